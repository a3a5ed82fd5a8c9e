"""What tests of the search itself look at: a search that draws nothing that has to be asked for, where few known bugs show."""

from eagletwin.cases.blocks import SearchConstraints
from eagletwin.harness.commands.fuzz.coverage import TOPICS, feature_filter

_ALWAYS = ("chains", "trees", "eagle", "eagle3", "plain-draft", "layers", "latent", "experts", "windows", "states", "sampling")
PLAIN = feature_filter([], [topic.key for topic in TOPICS if topic.key not in _ALWAYS])
GREEDY = SearchConstraints(held={"model": "llama-tiny"}, sampling="", wanted=PLAIN)
