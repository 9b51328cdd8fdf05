from standin import stand_in

stand_in(__name__, "0.4.7")
