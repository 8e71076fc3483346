"""Before and on TPU machines in the cloud: what a run would take (``mwjax plan``), starting it and keeping it going
(``mwjax launch``).

``plan`` compiles the train step for a slice (``ahead``) and adds up ``memory``, ``flops`` and, from the compiled
program (``hlo``), its ``traffic``; ``roofline`` makes times of them, ``search`` lists other ways, ``plan_report``
prints. What is compiled there is real; nothing of it has run on a TPU.

``job`` says what is to run where; ``commands`` and ``remote`` turn that into argument lists of the cloud client and
scripts for the hosts, without running anything; ``cloud``, ``rented``, ``hosts`` and ``stream`` run them, ``supervise``
in the right order; ``dry_run`` prints them. ``topologies`` knows the slices that can be rented.

Nothing here has run against the real cloud, on a TPU host or on GKE. The tests drive it against a stand-in for
``gcloud`` whose hosts are folders of one machine, in which the scripts really run; the real client's own parser accepts
every command (gcloud 528.0.0).
"""
