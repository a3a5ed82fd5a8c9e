"""What unwritten and freed KV slots hold: engines write it, and whoever asks whose a wrong number is knows it again.

Poison makes a read of an unwritten slot show. Keys are poisoned with a small number, so that attention gives
the slot an ordinary weight whatever the query (a huge key could get weight zero and hide); values with a huge finite
one, so that any weight at all moves the output by more than every bound. Both stay finite in float32, bfloat16 and float16.

A latent row is the key and the value of its slot at once. It is poisoned with 1, the size of the numbers that lie there: such
a row gets the attention of any other, and its values are as far from the right ones as those of another position.

A state is multiplied by a query and added to: poison is as huge as that of values, and so is that of a convolution's inputs.
"""

KEY_POISON = 0.25
VALUE_POISON = 1.0e4
LATENT_POISON = 1.0
STATE_POISON = 1.0e4

# What a trace has in place of a row whose slot left the window of its layer, and was freed: nothing lies there. It is no number
# that a model computes here, and exact in every type.
GONE = -(2.0**15)
