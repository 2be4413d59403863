"""Tests that need torchvision run in another environment (`make test-videos`): with it, the others would test other code."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torchvision") else ["test_video_processors.py"]
