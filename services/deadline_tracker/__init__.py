"""The deadline-tracker: verdicts on tasks, guarantee ratios with bounds, warnings; it has no timer of its own."""
