"""SGLang's external-model package (SGLANG_EXTERNAL_MODEL_PACKAGE): only the model classes that the recipes use.

Without it SGLang imports every model it has, some 440 modules, at each start.
"""
