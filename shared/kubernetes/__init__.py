"""Talking to the API server of a Kubernetes: settings, one client, and one loop that follows what it has.

Nothing is imported here, so that only who talks to one pays for the client library.
"""
