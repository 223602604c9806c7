"""The pure parts of the placer: deciding where, and the life of each request; no I/O, clock or chance lives here."""
