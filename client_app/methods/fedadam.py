"""FedAdam at a site: FedAvg's side; the moments are the server's."""

from fedsilo.client_app.methods.fedavg import FedAvgSite

FedAdamSite = FedAvgSite
