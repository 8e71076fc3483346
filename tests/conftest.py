from hypothesis import settings

settings.register_profile("mwjax", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("mwjax")
