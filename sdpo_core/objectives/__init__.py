"""Pure maths: support tables, divergences, advantages, policy loss, reduction."""
