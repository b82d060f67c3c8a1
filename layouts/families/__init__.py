"""Model families, a file each: whose tensor names these are, and where each tensor belongs."""
