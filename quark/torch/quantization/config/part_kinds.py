"""Kinds of parts of a model. It imports nothing, so that listing the names costs nothing.

=============  ====================================================================================
kind           modules
=============  ====================================================================================
``tower``      models of images or audio inside of a model that generates text
``projector``  layers between a tower and the language model
``router``     layers that weigh the experts of a mixture, and the gate of a shared expert
=============  ====================================================================================
"""

PARTS = ("tower", "projector", "router")
