"""`lazy` lifts an optax transformation to rows; what may be lifted, and how."""
