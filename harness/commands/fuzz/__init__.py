"""`eagletwin fuzz`: generate cases until one diverges, then shrink it."""
