"""The placer: decides where containers go and carries the decision through; starts nothing by being imported."""
