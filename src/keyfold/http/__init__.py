"""The HTTP door: one responder for every route of the parts, found by Falcon's router, served by Granian."""
