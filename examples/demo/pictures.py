"""Real pictures that Python packages ship: hand-written digits, and photos whose licence allows any use."""

import gzip
import importlib.util
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

#: Digits kept for the evaluation; the training split never shows them.
NUM_HELD_OUT = 297
#: Permutation of the digits behind the split; it does not depend on the run's seed, so runs can be compared.
SPLIT_SEED = 0
#: Side in pixels that a digit is shown at: 4 tokens under Qwen's patches.
DIGIT_SIDE = 56
#: Range of a photo's longer side in pixels: about 16 to 100 tokens.
PHOTO_SIDES = (112, 280)
_DIGIT_LEVELS = 16


class Photo(NamedTuple):
    """A photo in an installed package, what it shows, and the licence its package states for it."""

    package: str
    path: str
    shows: str
    licence: str


#: scikit-image states each licence in the docstring of the function that loads the picture, scikit-learn in a README beside
#: the files. Pictures without a statement are left out.
PHOTOS: tuple[Photo, ...] = (
    Photo("sklearn", "datasets/images/china.jpg", "a Chinese temple", "CC BY 2.0, danielbuechele on Flickr"),
    Photo("sklearn", "datasets/images/flower.jpg", "a flower", "CC BY 2.0, vultilion on Flickr"),
    Photo("skimage", "data/brick.png", "a brick wall", "CC0"),
    Photo("skimage", "data/camera.png", "a man with a camera", "CC0"),
    Photo("skimage", "data/cell.png", "a cell under the microscope", "CC0"),
    Photo("skimage", "data/chelsea.png", "a cat", "CC0"),
    Photo("skimage", "data/clock_motion.png", "a wall clock", "public domain"),
    Photo("skimage", "data/coffee.png", "a cup of coffee", "CC0"),
    Photo("skimage", "data/grass.png", "grass", "CC0"),
    Photo("skimage", "data/gravel.png", "gravel", "CC0"),
    Photo("skimage", "data/horse.png", "the outline of a horse", "CC0"),
    Photo("skimage", "data/hubble_deep_field.jpg", "galaxies in deep space", "public domain, NASA"),
    Photo("skimage", "data/retina.jpg", "the retina of an eye", "CC0"),
    Photo("skimage", "data/rocket.jpg", "a rocket at its launch", "public domain, SpaceX"),
)


class Digits:
    """Hand-written 8 x 8 digits of scikit-learn (UCI), in a training and a held-out split.

    Args:
        split: "train" or "held_out".
    """

    def __init__(self, split: str) -> None:
        if split not in ("train", "held_out"):
            raise ValueError(f"split must be 'train' or 'held_out', got {split!r}")
        # The file itself, because importing scikit-learn would take every rank more than a second.
        with gzip.open(package_file("sklearn", "datasets/data/digits.csv.gz"), "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.int64)
        order = np.random.default_rng(SPLIT_SEED).permutation(len(table))
        table = table[order[:-NUM_HELD_OUT] if split == "train" else order[-NUM_HELD_OUT:]]
        self._pixels, self.labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return a digit as black ink on a white square."""
        ink = 255 - self._pixels[index] * 255 // _DIGIT_LEVELS
        return Image.fromarray(ink.astype(np.uint8)).resize((DIGIT_SIDE, DIGIT_SIDE), Image.Resampling.BICUBIC).convert("RGB")


class Photos:
    """The photos above, opened once and shown at random sizes."""

    def __init__(self) -> None:
        self._images = [_open(photo) for photo in PHOTOS]

    def draw(self, rng: random.Random) -> tuple[Image.Image, str]:
        """Return a random photo at a random size, and what it shows."""
        index = rng.randrange(len(PHOTOS))
        image = self._images[index].copy()
        side = rng.randint(*PHOTO_SIDES)
        image.thumbnail((side, side), Image.Resampling.BICUBIC)
        return image, PHOTOS[index].shows


def package_file(package: str, path: str) -> Path:
    """Return the path of a file that an installed package ships, without importing the package.

    Raises:
        ValueError: the package is not installed, or does not hold the file.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"the demo reads data of {package!r}, which is not installed")
    file = Path(spec.origin).parent / path
    if not file.is_file():
        raise ValueError(f"{package!r} is installed, but has no file {path!r}")
    return file


def _open(photo: Photo) -> Image.Image:
    image = Image.open(package_file(photo.package, photo.path)).convert("RGB")
    # Twice the largest size shown is enough to draw from, and keeps each later resize cheap.
    image.thumbnail((2 * PHOTO_SIDES[1], 2 * PHOTO_SIDES[1]), Image.Resampling.BICUBIC)
    return image
