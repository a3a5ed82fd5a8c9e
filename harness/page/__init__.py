"""A command's report as one document: the model, and its renderers for text, Markdown and the HTML page."""
