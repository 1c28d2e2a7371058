"""The training data of a run: samples by number, the same on every peer."""

from shoal.runtime.data.dataset import Dataset, open_dataset, vocabulary
from shoal.runtime.data.tokenizer import Tokenizer, open_tokenizer

__all__ = ["Dataset", "Tokenizer", "open_dataset", "open_tokenizer", "vocabulary"]
