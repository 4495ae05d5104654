// SPDX-License-Identifier: Apache-2.0
//! Calls to etcd. There is one client for each endpoint. An endpoint is used until it fails, then the next one is used. (The balancer of
//! etcd-client itself keeps sending calls to endpoints that are dead.) Every call has a time limit.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, GetOptions, GetResponse, KvClient, Txn, TxnResponse};
use tokio::time::{Instant, timeout};

use crate::retry::chain;
use crate::source::Error;

use super::call_failure::{CallFailure, is_about_auth, is_auth_off, is_refusal, may_succeed_elsewhere, store_error};
use super::tls::{self, BadOptions, Stamp};
use super::{CALL_LIMIT, EtcdOptions};

/// How often changed files that do not work are tried again while the present connection works.
const TRY_FILES_EVERY: Duration = Duration::from_secs(60);

/// The largest answer in bytes. A page of 8,000 leases has 4 MB. But whoever may write leases may write values of up to 1.5 MB each, so
/// that a page would have gigabytes. Such a page is read in smaller ones.
pub(super) const MESSAGE_LIMIT: usize = 16 << 20;

struct Endpoint {
    url: String,
    client: RefCell<Option<Connection>>,
}

/// A client, and the version of the certificate files that it uses.
#[derive(Clone)]
struct Connection {
    client: Client,
    files: Stamp,
    /// Another version of the files that was tried since, and when.
    tried: Option<(Stamp, Instant)>,
}

/// All endpoints, and which one is in use.
pub(super) struct Pool {
    endpoints: Vec<Endpoint>,
    current: Cell<usize>,
    options: EtcdOptions,
    user: Option<(String, String)>,
    /// The last login found that etcd has authentication off. This is logged once.
    auth_is_off: Cell<bool>,
    /// The options for each endpoint, from the last version of the files that was valid.
    valid: RefCell<Vec<ConnectOptions>>,
    /// What is wrong with the present version of the files. Each problem is logged once.
    problem: RefCell<Option<BadOptions>>,
    /// What replaces connections.
    #[cfg(feature = "etcd-channel")]
    channels: Option<Channels>,
}

/// Returns what replaces the connection to an endpoint.
#[cfg(feature = "etcd-channel")]
pub type Channels = Box<dyn Fn(&str) -> etcd_client::Channel>;

/// A client and the index of its endpoint.
pub(super) struct ChosenEndpoint {
    pub(super) index: usize,
    pub(super) client: Client,
}

/// Returns a key-value client that accepts answers up to [`MESSAGE_LIMIT`].
pub(super) fn kv(client: &Client) -> KvClient {
    client.kv_client().max_decoding_message_size(MESSAGE_LIMIT)
}

/// Makes a call with a time limit.
pub(super) async fn limited<T>(call: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, CallFailure> {
    match timeout(CALL_LIMIT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(CallFailure::Etcd(error)),
        Err(_) => Err(CallFailure::Silent),
    }
}

impl Pool {
    /// Checks the options and reads the files. Does not connect yet.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names the flag and the remedy.
    pub(super) fn new(options: EtcdOptions) -> Result<Pool, Error> {
        let user = tls::user(&options)?;
        let targets = tls::endpoints(&options)?;
        tls::warn_of_http(&options, &targets);
        let (endpoints, valid) =
            targets.into_iter().map(|(url, how)| (Endpoint { url, client: RefCell::new(None) }, how)).unzip();
        let valid = RefCell::new(valid);
        Ok(Pool {
            endpoints,
            current: Cell::new(0),
            options,
            user,
            auth_is_off: Cell::new(false),
            valid,
            problem: RefCell::new(None),
            #[cfg(feature = "etcd-channel")]
            channels: None,
        })
    }

    /// Uses these channels instead of connections.
    #[cfg(feature = "etcd-channel")]
    pub(super) fn use_channels(&mut self, channels: Channels) {
        self.channels = Some(channels);
    }

    /// Returns all URLs for messages.
    pub(super) fn urls(&self) -> String {
        self.endpoints.iter().map(|endpoint| endpoint.url.as_str()).collect::<Vec<_>>().join(",")
    }

    /// Returns the flags with which etcdctl reaches the same cluster. The password is left out.
    pub(super) fn etcdctl_flags(&self) -> String {
        let EtcdOptions { ca_file, cert_file, key_file, username, .. } = &self.options;
        let files = [("cacert", ca_file), ("cert", cert_file), ("key", key_file)];
        let files =
            files.into_iter().filter_map(|(flag, file)| Some(format!(" --{flag}={}", file.as_ref()?.display())));
        let user = username.iter().map(|name| format!(" --user={name}"));
        format!("--endpoints={}{}", self.urls(), files.chain(user).collect::<String>())
    }

    pub(super) fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Returns the index of the endpoint in use.
    pub(super) fn current(&self) -> usize {
        self.current.get()
    }

    pub(super) fn url(&self) -> &str {
        &self.endpoints[self.current.get()].url
    }

    /// Returns a client of the endpoint in use, made from the present files. If it cannot connect, the next endpoint comes into use.
    pub(super) async fn connect(&self) -> Result<ChosenEndpoint, CallFailure> {
        let index = self.current.get();
        let held = self.endpoints[index].client.borrow().clone();
        if let Some(held) = held {
            let client = self.renewed(index, &held).await.unwrap_or(held.client);
            return Ok(ChosenEndpoint { index, client });
        }
        let files = Stamp::of(&self.options);
        self.read_files().await;
        match self.client(index).await {
            Ok(client) => {
                *self.endpoints[index].client.borrow_mut() =
                    Some(Connection { client: client.clone(), files, tried: None });
                Ok(ChosenEndpoint { index, client })
            }
            Err(failure) => {
                self.failed(index);
                Err(failure)
            }
        }
    }

    /// Connects to an endpoint, and logs in if there is a user.
    ///
    /// If etcd has its authentication off, it refuses the login, and the client has no user, as with flannel. When authentication is turned
    /// on, etcd refuses the next call of that client, and [`Pool::call`] connects again.
    async fn client(&self, index: usize) -> Result<Client, CallFailure> {
        let how = self.valid.borrow()[index].clone();
        let Some((name, password)) = self.user.clone() else { return self.client_with(index, how).await };
        let with_user = how.clone().with_user(name, password).with_auto_token_refresh(true);
        match self.client_with(index, with_user).await {
            Err(CallFailure::Etcd(error)) if is_auth_off(&error) => {
                if !self.auth_is_off.replace(true) {
                    tracing::warn!(
                        "etcd has authentication turned off: --etcd-username is not used, and everybody may write leases"
                    );
                }
                self.client_with(index, how).await
            }
            Ok(client) => {
                if self.auth_is_off.replace(false) {
                    tracing::info!("etcd has authentication turned on again: --etcd-username is used");
                }
                Ok(client)
            }
            failed => failed,
        }
    }

    async fn client_with(&self, index: usize, how: ConnectOptions) -> Result<Client, CallFailure> {
        #[cfg(feature = "etcd-channel")]
        if let Some(channels) = &self.channels {
            return limited(Client::from_channel(channels(&self.endpoints[index].url), Some(how))).await;
        }
        limited(Client::connect([&self.endpoints[index].url], Some(how))).await
    }

    /// Reads the files again. Returns false if they are not valid, for example because a rotation has replaced only one of them. Then
    /// the last valid version stays in use.
    async fn read_files(&self) -> bool {
        match tls::read_again(&self.options).await {
            Ok(how) => {
                *self.valid.borrow_mut() = how;
                self.problem.replace(None);
                true
            }
            Err(why) => {
                if self.problem.replace(Some(why.clone())).as_ref() != Some(&why) {
                    tracing::warn!("etcd credentials: {why}; those that were read before stay in use");
                }
                false
            }
        }
    }

    /// Returns a client with the present files if they differ from those of `held`. The new client replaces `held` only after etcd
    /// has answered it, because `held` still works.
    async fn renewed(&self, index: usize, held: &Connection) -> Option<Client> {
        let now = Stamp::of(&self.options);
        let tried = |(files, at): &(Stamp, Instant)| *files == now && at.elapsed() < TRY_FILES_EVERY;
        if now == held.files || held.tried.as_ref().is_some_and(tried) {
            return None;
        }
        if let Some(held) = &mut *self.endpoints[index].client.borrow_mut() {
            held.tried = Some((now.clone(), Instant::now()));
        }
        if !self.read_files().await {
            return None;
        }
        let answer = match self.client(index).await {
            Ok(client) => {
                limited(client.maintenance_client().status()).await.map(|_| client.clone()).or_else(|failure| {
                    // etcd answered, even if it refused the call. So the connection works.
                    if matches!(&failure, CallFailure::Etcd(error) if !may_succeed_elsewhere(error)) {
                        Ok(client)
                    } else {
                        Err(failure)
                    }
                })
            }
            Err(failure) => Err(failure),
        };
        match answer {
            Ok(client) => {
                tracing::info!("etcd credentials: the files changed and are used from now on");
                let held = Connection { client: client.clone(), files: now, tried: None };
                *self.endpoints[index].client.borrow_mut() = Some(held);
                Some(client)
            }
            Err(failure) => {
                let why = chain(&failure);
                tracing::warn!(
                    "etcd credentials: the files changed and do not work ({why}); the connection stays as it is"
                );
                None
            }
        }
    }

    /// Closes the connection of an endpoint that failed. If it is the one in use, the next one comes into use.
    pub(super) fn failed(&self, index: usize) {
        *self.endpoints[index].client.borrow_mut() = None;
        self.leave(index);
    }

    /// If this endpoint is the one in use, the next one comes into use.
    fn leave(&self, index: usize) {
        if self.current.get() == index {
            self.current.set((index + 1) % self.endpoints.len());
        }
    }

    /// Makes one call, on each endpoint once until one succeeds. A write whose answer was lost may have been carried out, so every
    /// write must be a transaction, and its caller must read again after a conflict.
    pub(super) async fn call<T, F, Fut>(&self, what: &str, call: F) -> Result<T, Error>
    where
        F: Fn(Client) -> Fut,
        Fut: Future<Output = Result<T, etcd_client::Error>>,
    {
        let mut left = self.endpoints.len();
        let mut renewed = false;
        loop {
            let url = self.url();
            let tried = match self.connect().await {
                Ok(to) => (limited(call(to.client)).await, Some(to.index)),
                Err(failure) => (Err(failure), None),
            };
            let failure = match tried {
                (Ok(answer), _) => return Ok(answer),
                (Err(failure), Some(index)) => {
                    let stale = matches!(&failure, CallFailure::Etcd(error) if is_about_auth(error));
                    if stale && !renewed {
                        // The client itself replaces a token that etcd does not know any more. It does not replace one that etcd has signed
                        // and that is older than the last change of the users. Log in again at the same endpoint, once.
                        renewed = true;
                        *self.endpoints[index].client.borrow_mut() = None;
                        continue;
                    }
                    if matches!(&failure, CallFailure::Etcd(error) if !may_succeed_elsewhere(error)) {
                        return Err(store_error(what, url, failure));
                    }
                    if matches!(&failure, CallFailure::Etcd(error) if is_refusal(error)) {
                        // A member with too much to do would get still more by new connections and logins.
                        self.leave(index);
                    } else {
                        self.failed(index);
                    }
                    failure
                }
                (Err(failure), None) => failure,
            };
            left = left.saturating_sub(1);
            if left == 0 {
                return Err(store_error(what, url, failure));
            }
        }
    }

    /// Reads a key or a range.
    pub(super) async fn get<K>(&self, what: &str, key: K, options: Option<GetOptions>) -> Result<GetResponse, Error>
    where
        K: AsRef<[u8]>,
    {
        self.call(what, |client| {
            let (key, options) = (key.as_ref().to_vec(), options.clone());
            async move { kv(&client).get(key, options).await }
        })
        .await
    }

    /// Makes a transaction.
    pub(super) async fn transact(&self, what: &str, txn: &Txn) -> Result<TxnResponse, Error> {
        self.call(what, |client| {
            let txn = txn.clone();
            async move { kv(&client).txn(txn).await }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend_types::FOR_TESTS;

    fn options() -> EtcdOptions {
        EtcdOptions {
            endpoints: vec!["http://10.0.0.1:2379".into(), "10.0.0.2:2379".into()],
            prefix: "/coreos.com/network".into(),
            key_file: None,
            cert_file: None,
            ca_file: None,
            username: Some("node".into()),
            password: Some("secretsecret".into()),
            lease_ttl: Duration::from_secs(86_400),
            renew_margin: Duration::from_secs(3600),
            types: FOR_TESTS,
        }
    }

    /// The line is shown to people, and may be copied to others.
    #[test]
    fn the_flags_of_etcdctl_name_the_user_and_not_the_password() {
        let flags = Pool::new(options()).map(|pool| pool.etcdctl_flags()).unwrap();
        assert_eq!(flags, "--endpoints=http://10.0.0.1:2379,http://10.0.0.2:2379 --user=node");
    }

    /// The watch and the renewals fail at the same time. The second failure must not lead away from an endpoint that works.
    #[test]
    fn a_failure_of_an_endpoint_that_was_left_before_does_not_change_the_one_in_use() {
        let pool = Pool::new(options()).unwrap();
        let in_use_after = |failed: usize| {
            pool.failed(failed);
            pool.current()
        };
        assert_eq!([0, 0, 1, 1].map(in_use_after), [1, 1, 0, 0]);
    }
}
