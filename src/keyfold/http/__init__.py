"""The HTTP door: Falcon on Granian, one generic responder, the parts' routes as data."""
