"""triolet-nano, the small chat model that ships with triolet. Its model card is the README.md beside this file."""

from pathlib import Path

PATH: Path = Path(__file__).parent
"""The model's folder, in the Hugging Face layout."""
