"""Figures of steps: statistics, callbacks, the run log and advice."""
