"""Retrieval: examples/two_towers.py against WARP of LightFM (lightfm-next).

Data and score are the same as in the race with implicit; lightfm-next is the fork of
LightFM that builds today.
"""

from benchmarks.races import implicit


PEER, ALONE, VERSION_OF = ["lightfm-next==1.19.0"], implicit.ALONE, "lightfm-next"
EXAMPLE, UNIT, SCORE = implicit.EXAMPLE, implicit.UNIT, implicit.SCORE
DATA, SETTINGS = implicit.DATA, implicit.SETTINGS
LR, EPOCHS = {"ours": 3e-3, "peer": 0.05}, {"ours": 6, "peer": 30}
prepare, ours, score = implicit.prepare, implicit.ours, implicit.score
