from standin import stand_in

stand_in(__name__, "3.7.1", decorators=True)
