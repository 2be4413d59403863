"""Profiles of the property tests: 100 examples by default, `EVENPACK_HYPOTHESIS=full` for 300, `nightly` for 10,000."""

import os

from hypothesis import HealthCheck, settings

quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=100, derandomize=True, **quiet)
settings.register_profile("full", max_examples=300, derandomize=True, **quiet)
settings.register_profile("nightly", max_examples=10_000, **quiet)
settings.load_profile(os.environ.get("EVENPACK_HYPOTHESIS", "default"))
