"""What all services share: the contract, the runtime and the deadline maths; no service lives here."""
