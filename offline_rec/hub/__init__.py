"""The Hugging Face hub: what of a run or a dataset may go there, and pushing it."""
