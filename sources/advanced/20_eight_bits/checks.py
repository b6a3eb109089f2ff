from utils.labs.cases import Question
from utils.labs.kinds import number
bits_of_mxfp4 = Question("x", number("a number of bits"), right=4.25)
received_gb=Question("x", number("a number of GB"), right=7.875, within=.01)
