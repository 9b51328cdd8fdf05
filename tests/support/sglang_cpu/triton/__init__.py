from standin import stand_in, without_pinned_memory

stand_in(__name__, "3.7.1", decorators=True)
without_pinned_memory()
