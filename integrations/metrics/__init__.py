"""Metrics: callbacks of the scheduler that write its figures to TensorBoard, Weights & Biases and Prometheus."""

from .base import Metrics
from .prometheus import PrometheusMetrics
from .tensorboard import TensorBoardMetrics
from .wandb import WandbMetrics

__all__ = ["Metrics", "PrometheusMetrics", "TensorBoardMetrics", "WandbMetrics"]
