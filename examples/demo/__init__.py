"""Demo: supervised fine-tuning of a tiny vision-language model, on real images and text, through evenpack.

Start it with ``make demo`` or ``python examples/demo/run.py --ranks 2``; the training loop is in `train.py`.
"""
