"""What unwritten and freed KV slots hold: engines write it, and whoever asks whose a wrong number is knows it again.

Poison makes a read of an unwritten slot show. Keys are poisoned with a small number, so that attention gives
the slot an ordinary weight whatever the query (a huge key could get weight zero and hide); values with a huge finite
one, so that any weight at all moves the output by more than every bound. Both stay finite in float32, bfloat16 and float16.
"""

KEY_POISON = 0.25
VALUE_POISON = 1.0e4
