"""Step times of large groups from micro-batch times that were measured, and what planning costs there."""
