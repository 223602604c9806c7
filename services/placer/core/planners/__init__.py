"""Planners turn ranked options into assignments; today there is one, for any number of replicas."""
