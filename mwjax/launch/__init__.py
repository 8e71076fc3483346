"""Starting a run on TPU machines in the cloud, and keeping it going: ``mwjax launch``.

``job`` says what is to run where; ``commands`` and ``remote`` turn that into argument lists of the cloud client and
scripts for the hosts, without running anything; ``cloud``, ``stream`` and ``supervise`` run them; ``dry_run`` prints
them. ``topologies`` knows the slices that can be rented.

Nothing here has run against the real cloud, on a TPU host or on GKE. The tests drive it against a stand-in for
``gcloud`` whose hosts are folders of one machine, in which the scripts really run; the real client's own parser accepts
every command (gcloud 528.0.0).
"""
