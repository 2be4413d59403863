"""Prometheus."""

from collections.abc import Mapping
from typing import Any

from .base import Metrics

#: Figures that only grow: counters, by the name that they get.
COUNTERS = {
    "steps": "steps_total",
    "samples": "samples_total",
    "tokens": "tokens_total",
    "moved_bytes": "moved_bytes_total",
    "shuffle_bytes": "shuffle_bytes_total",
    "num_dropped": "samples_dropped_total",
    "num_truncated": "samples_truncated_total",
    "exposed_seconds": "exposed_seconds_total",
}
#: Figures that go up and down: gauges, by the name that they get, with what they mean.
_GAUGES = {
    "tokens_per_second": ("tokens_per_second", "Real tokens a second, whole group"),
    "step_seconds": ("step_seconds", "Seconds between two steps"),
    "padding_share": ("padding_ratio", "Share of the computed tokens that is padding"),
    "efficiency": ("efficiency_ratio", "Share of the ranks' time, as planned, that is work"),
    "lost_to_step": ("lost_to_step_ratio", "Share of the ranks' time that no plan of the step's samples gains"),
    "lost_to_plan": ("lost_to_plan_ratio", "Share of the ranks' time that the plan leaves against its bound"),
    "lost_to_window": ("lost_to_window_ratio", "Share of the ranks' time that longer windows would gain"),
    "imbalance": ("imbalance_ratio", "Largest over mean load, as planned"),
    "imbalance_home": ("imbalance_home_ratio", "Largest over mean load, had every sample stayed at home"),
    "bubble": ("bubble_ratio", "Share of the compute that waits"),
    "gap_to_bound": ("gap_to_bound_ratio", "How far the plan may be from the best"),
    "exposed_share": ("exposed_ratio", "Share of the step in which training waits for the scheduler"),
    "prepare_seconds": ("prepare_seconds", "Seconds to prepare a step"),
    "num_microbatches": ("microbatches", "Packs of a rank in a step"),
    "num_carried": ("samples_carried", "Samples that wait for a later step of a window"),
    "mean_delay": ("delay_steps", "Mean steps between a sample's turn and its step"),
    "tokens_over_mean": ("tokens_over_mean_ratio", "Tokens of a step over the mean of the steps in view"),
}


class PrometheusMetrics(Metrics):
    """Sets gauges and counters that Prometheus scrapes: `evenpack_tokens_per_second`, `evenpack_moved_bytes_total`, ...

    Args:
        registry: where they are registered; default: the library's own.
        port: serve them over HTTP on the first rank, at the first step; 0 takes a free one; None leaves serving to you.
        address: address to serve on; the loopback by default, "0.0.0.0" where the scraper is on another machine.
        namespace: first part of each name.
        **settings: see `Metrics`, without `prefix`.

    Attributes:
        url: where they are served, None while they are not.

    Raises:
        ImportError: `prometheus-client` is not installed.

    Example:
        >>> PackingScheduler(loader, ..., callbacks=[PrometheusMetrics(port=9400)])        # doctest: +SKIP
    """

    _module = "prometheus_client"

    def __init__(
        self, registry: Any = None, *, port: int | None = None, address: str = "127.0.0.1", namespace: str = "evenpack",
        **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(prefix="", **settings)
        assert self._library is not None
        self._registry = registry or self._library.REGISTRY
        self._port, self._address, self._namespace = port, address, namespace
        self._metrics: dict[str, Any] = {}
        self._server: Any = None
        self.url: str | None = None

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Set the gauges, and add to the counters."""
        if not self._metrics:
            try:
                self._begin()
            except ValueError as error:
                raise ValueError(
                    f"{error}: {self._namespace}_... is in this registry already; give each scheduler a namespace "
                    "or a registry of its own"
                ) from error
        for name in COUNTERS:
            self._metrics[name].inc(figures[name])
        for name in _GAUGES:
            if name in figures:
                self._metrics[name].set(figures[name])
        self._metrics["step"].set(step)

    def close(self) -> None:
        """Write what was not written yet, stop serving, and take the metrics out of the registry."""
        super().close()
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = self.url = None
        for metric in self._metrics.values():
            self._registry.unregister(metric)
        self._metrics = {}

    def _begin(self) -> None:
        library, more = self._library, {"namespace": self._namespace, "registry": self._registry}
        assert library is not None
        for name, called in COUNTERS.items():
            self._metrics[name] = library.Counter(called, f"Sum over the steps of {name.replace('_', ' ')}", **more)
        for name, (called, meaning) in _GAUGES.items():
            self._metrics[name] = library.Gauge(called, meaning, **more)
        self._metrics["step"] = library.Gauge("step", "Number of the last step", **more)
        if self._port is not None:
            self._server = library.start_http_server(self._port, addr=self._address, registry=self._registry)
            self.url = f"http://{self._address}:{self._server[0].server_port}/metrics"
