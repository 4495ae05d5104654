// SPDX-License-Identifier: Apache-2.0
//! A simulated etcd server. The agents use the real store code and etcd's own client library; only the connection is replaced
//! ([`Server::channel`]).

use std::pin::Pin;
use std::time::Duration;

use etcd_client::Channel;
use futures_util::stream::{self, Stream, StreamExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tonic::body::Body;
use tonic::{Request, Response, Status, Streaming};
use tower::util::BoxCloneSyncService;

use crate::etcd::{Etcd, Refused};
use crate::pb::kv_server::{Kv, KvServer};
use crate::pb::lease_server::{Lease, LeaseServer};
use crate::pb::watch_server::{Watch, WatchServer};
use crate::pb::{
    self, DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseKeepAliveResponse, LeaseRevokeRequest, LeaseRevokeResponse, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
    PutRequest, PutResponse, RangeRequest, RangeResponse, TxnRequest, TxnResponse, WatchRequest, WatchResponse,
    watch_request,
};
use crate::shared::Shared;
use crate::wire::{LATENCY, Wire};

/// How often an idle watch gets a progress notification. etcd's interval is ten minutes.
const PROGRESS: Duration = Duration::from_secs(600);

impl From<Refused> for Status {
    fn from(refused: Refused) -> Status {
        let text = refused.to_string();
        match refused {
            Refused::Compacted | Refused::Future => Status::out_of_range(text),
            Refused::NoLease => Status::not_found(text),
            Refused::LeaseExists => Status::failed_precondition(text),
            Refused::NoKey => Status::invalid_argument(text),
        }
    }
}

/// The server, which all nodes share.
#[derive(Debug, Clone)]
pub struct Server(Shared<Etcd>);

impl Server {
    /// Returns a server with this content, and starts to expire its leases.
    pub fn start(content: Etcd) -> Server {
        let server = Server(Shared::new(content));
        let expiring = server.clone();
        tokio::spawn(async move {
            loop {
                sleep(Duration::from_secs(1)).await;
                let now = Instant::now();
                if expiring.read(Etcd::next_expiry).is_some_and(|at| at <= now) {
                    expiring.change(|etcd| etcd.expire(now));
                }
            }
        });
        server
    }

    /// Reads the content.
    pub fn read<T>(&self, read: impl FnOnce(&Etcd) -> T) -> T {
        self.0.read(read)
    }

    /// Changes the content, as a client would.
    pub fn change<T>(&self, change: impl FnOnce(&mut Etcd) -> T) -> T {
        self.0.change(change)
    }

    /// Starts the server again with this content. All watches end.
    pub fn restart_with(&self, mut content: Etcd) {
        content.restart_leases(Instant::now());
        self.0.restart_with(content);
    }
}

/// The server as one node reaches it.
#[derive(Debug, Clone)]
struct Connection {
    server: Server,
    wire: Wire,
}

impl Server {
    /// Returns what etcd's client library uses in place of a connection over this wire.
    pub fn channel(&self, wire: &Wire) -> Channel {
        let connection = Connection { server: self.clone(), wire: wire.clone() };
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let connection = connection.clone();
            async move { Ok::<_, tower::BoxError>(connection.call(request).await) }
        });
        Channel::Custom(BoxCloneSyncService::new(service))
    }
}

impl Connection {
    async fn call(self, request: http::Request<Body>) -> http::Response<Body> {
        use tower::ServiceExt;
        if !self.wire.carry_request().await {
            return Status::unavailable("tcp connect error: Connection refused").into_http();
        }
        if self.wire.is_throttled() {
            return Status::resource_exhausted("etcdserver: too many requests").into_http();
        }
        let service = request.uri().path().split('/').nth(1).unwrap_or_default().to_owned();
        let answer = match service.as_str() {
            "etcdserverpb.KV" => KvServer::new(self.clone()).oneshot(request).await,
            "etcdserverpb.Lease" => LeaseServer::new(self.clone()).oneshot(request).await,
            "etcdserverpb.Watch" => WatchServer::new(self.clone()).oneshot(request).await,
            _ => Ok(Status::unimplemented("the simulated etcd does not have this service").into_http()),
        };
        self.wire.carry_answer().await;
        match answer {
            Ok(answer) => answer,
            Err(never) => match never {},
        }
    }

    /// Sends an event to the client when the network lets it through. Returns false if the stream has ended.
    async fn deliver(&self, out: &mpsc::Sender<Result<WatchResponse, Status>>, message: WatchResponse) -> bool {
        self.wire.passable().await;
        out.send(Ok(message)).await.is_ok()
    }

    /// Serves one watch until the client or the server ends it.
    async fn follow(self, create: pb::WatchCreateRequest, out: mpsc::Sender<Result<WatchResponse, Status>>) {
        let (mut changes, mut restarts) = (self.server.0.changes(), self.server.0.restarts());
        let (header, is_starved) = (self.server.read(Etcd::header), self.wire.starves_watches());
        if !self.deliver(&out, WatchResponse { header, created: true, ..WatchResponse::default() }).await {
            return;
        }
        if is_starved {
            return out.closed().await;
        }
        let mut next = match create.start_revision {
            0 => self.server.read(Etcd::revision) + 1,
            revision => revision,
        };
        let mut progress = Instant::now() + PROGRESS;
        loop {
            changes.mark_unchanged();
            let compacted = self.server.read(Etcd::compacted);
            if next < compacted {
                let header = self.server.read(Etcd::header);
                let (canceled, compact_revision) = (true, compacted);
                let message = WatchResponse { header, canceled, compact_revision, ..WatchResponse::default() };
                self.deliver(&out, message).await;
                return;
            }
            let (events, header, revision) = self
                .server
                .read(|etcd| (etcd.changes(next, &create.key, &create.range_end), etcd.header(), etcd.revision()));
            next = next.max(revision + 1);
            let is_progress_due = create.progress_notify && Instant::now() >= progress;
            if !events.is_empty() || is_progress_due {
                progress = Instant::now() + PROGRESS;
                sleep(LATENCY + self.wire.lag()).await;
                if !self.deliver(&out, WatchResponse { header, events, ..WatchResponse::default() }).await {
                    return;
                }
                continue;
            }
            tokio::select! {
                biased;
                _ = restarts.changed() => {
                    let _ = out.send(Err(Status::unavailable("the server was restarted"))).await;
                    return;
                }
                () = out.closed() => return,
                _ = changes.changed() => {}
                () = sleep_until(progress) => {}
            }
        }
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn receive<T: Send + 'static>(mut from: mpsc::Receiver<Result<T, Status>>) -> Answers<T> {
    Box::pin(stream::poll_fn(move |context| from.poll_recv(context)))
}

#[tonic::async_trait]
impl Kv for Connection {
    async fn range(&self, request: Request<RangeRequest>) -> Result<Response<RangeResponse>, Status> {
        Ok(Response::new(self.server.read(|etcd| etcd.range(request.get_ref()))?))
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutResponse>, Status> {
        Ok(Response::new(self.server.change(|etcd| etcd.put(request.into_inner()))?))
    }

    async fn delete_range(
        &self,
        request: Request<DeleteRangeRequest>,
    ) -> Result<Response<DeleteRangeResponse>, Status> {
        Ok(Response::new(self.server.change(|etcd| etcd.delete(request.get_ref()))))
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Result<Response<TxnResponse>, Status> {
        Ok(Response::new(self.server.change(|etcd| etcd.txn(request.into_inner()))?))
    }
}

#[tonic::async_trait]
impl Watch for Connection {
    type WatchStream = Answers<WatchResponse>;

    async fn watch(&self, request: Request<Streaming<WatchRequest>>) -> Result<Response<Self::WatchStream>, Status> {
        let (out, answers) = mpsc::channel(64);
        let (connection, mut requests) = (self.clone(), request.into_inner());
        tokio::spawn(async move {
            let first = requests.next().await.and_then(Result::ok).and_then(|request| request.request_union);
            if let Some(watch_request::RequestUnion::CreateRequest(create)) = first {
                connection.follow(create, out).await;
            }
            // The stream of requests stays open until the watch has ended.
            drop(requests);
        });
        Ok(Response::new(receive(answers)))
    }
}

#[tonic::async_trait]
impl Lease for Connection {
    type LeaseKeepAliveStream = Answers<LeaseKeepAliveResponse>;

    async fn lease_grant(&self, request: Request<LeaseGrantRequest>) -> Result<Response<LeaseGrantResponse>, Status> {
        Ok(Response::new(self.server.change(|etcd| etcd.grant(request.get_ref(), Instant::now()))?))
    }

    async fn lease_revoke(
        &self,
        request: Request<LeaseRevokeRequest>,
    ) -> Result<Response<LeaseRevokeResponse>, Status> {
        self.server.change(|etcd| etcd.revoke(request.get_ref().id))?;
        Ok(Response::new(LeaseRevokeResponse { header: self.server.read(Etcd::header) }))
    }

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let connection = self.clone();
        let answers = request.into_inner().map(move |message| {
            let id = message?.id;
            Ok(connection.server.change(|etcd| etcd.keep_alive(id, Instant::now())))
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<LeaseTimeToLiveRequest>,
    ) -> Result<Response<LeaseTimeToLiveResponse>, Status> {
        Ok(Response::new(self.server.read(|etcd| etcd.time_to_live(request.get_ref(), Instant::now()))))
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;
    use weft_subnet::source::Event;

    use super::*;
    use crate::net_conf::WantedConf;
    use crate::store::{FalseLease, Store};

    /// etcd had defects by which a watch heard nothing more, while the server answered everything else.
    #[tokio::test(start_paused = true)]
    async fn a_watch_that_hears_nothing_is_opened_again_and_hears_what_it_has_missed() {
        let last = [10, 63, 255, 0].into();
        let conf = WantedConf { backend: "host-gw".to_owned(), vni: 1, wide: false, last, bad: None };
        let (mut store, wire) = (Store::etcd(&conf), Wire::default());
        let source = store.connect(&wire, 0, Duration::from_secs(86_400)).unwrap();
        let (out, mut events) = mpsc::channel(64);
        wire.starve_watches(true);
        let begin = Instant::now();
        let hears = async {
            assert!(matches!(events.recv().await, Some(Event::Snapshot { reset: false, .. })));
            // The watch is open.
            assert_eq!(events.recv().await, Some(Event::Answered));
            wire.starve_watches(false);
            let (name, data) = ("n1".to_owned(), "null".to_owned());
            let (subnet, public) = ("10.1.7.0/24".parse().unwrap(), [192, 168, 0, 7].into());
            store.add_lease(&FalseLease { name, subnet, public, data });
            loop {
                match events.recv().await.unwrap() {
                    Event::Changes(changes) => return changes.len(),
                    event => assert_eq!(event, Event::Answered, "it is no failure, and nothing is read again"),
                }
            }
        };
        tokio::select! {
            () = source.watch(out) => panic!("the watch ended"),
            heard = timeout(Duration::from_secs(7200), hears) => assert_eq!(heard.unwrap(), 1),
        }
        assert!(begin.elapsed() >= Duration::from_secs(1800), "a watch may be silent for 22 minutes");
    }
}
