"""Steps of very many samples: shared out to pods of ranks, each of which is planned alone."""

from .pods import Team, plan_in_pods, planner_for

__all__ = ["Team", "plan_in_pods", "planner_for"]
