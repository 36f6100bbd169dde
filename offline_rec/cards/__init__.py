"""Cards: what a model or a dataset is, as its own files tell it, in the form that model hubs show."""
