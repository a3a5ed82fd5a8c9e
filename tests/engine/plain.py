"""What tests of the search itself look at: a search that draws nothing that has to be asked for, where few known bugs show."""

from eagletwin.cases.blocks import Asked
from eagletwin.harness.commands.fuzz.coverage import TOPICS, narrowed

_ALWAYS = ("chains", "trees", "eagle", "eagle3", "plain-draft", "layers", "latent", "experts", "windows", "states", "sampling")
PLAIN = narrowed([], [topic.key for topic in TOPICS if topic.key not in _ALWAYS])
GREEDY = Asked(held={"model": "llama-tiny"}, sampling="", wanted=PLAIN)
