"""A model on one device within a budget: the steps that `outcore.within` takes."""
