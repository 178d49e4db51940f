"""FedAvgM at a site: FedAvg's side; the momentum is the server's."""

from fedsilo.client_app.methods.fedavg import FedAvgSite

FedAvgMSite = FedAvgSite
