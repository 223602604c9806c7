"""The placer: decides where containers run, keeps the ledger, and has backends carry it out."""
