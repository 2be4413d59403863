"""Planner code of other frameworks' released packages, run beside our re-implementations of it."""
