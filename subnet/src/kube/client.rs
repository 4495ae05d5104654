// SPDX-License-Identifier: Apache-2.0
//! Requests to the API server: credentials, time limits, and errors that name the remedy.
//!
//! A client is made for the first request and dropped after a failure. The next request reads the files again, so that a renewed client
//! certificate or kubeconfig is used without a restart. (The crate kube itself reads tokens in files again each minute.)

use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use futures_util::AsyncBufRead;
use http::{HeaderValue, Method, Request, Uri, header};
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use super::proxy::{BadProxy, Proxies};
use crate::retry::chain;
use crate::source::Error;

/// How long one request may take. Of lists, how long the next piece of the answer may take.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(10);
/// A watch without an event for so long is given up, even if the server answers other requests: a bookmark comes each minute.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_secs(150);
/// The longest line of a watch, bytes. etcd takes 1.5 MiB for an object by default. The API server writes a character such as `<` with six
/// bytes (`\u003c`), so that a line can have 9 MiB.
pub(super) const MAX_LINE: usize = 16 << 20;
/// How long a connection may take. After a boot nobody answers at the address of a Service until kube-proxy has written its rules. The
/// agent then starts with saved peers, so every second counts.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// A path that no API server has.
const NO_SUCH_PATH: &str = "/no-such-path";

/// HTTP codes of the server's errors.
pub(super) const UNAUTHORIZED: u16 = 401;
pub(super) const NOT_FOUND: u16 = 404;
pub(super) const CONFLICT: u16 = 409;
pub(super) const GONE: u16 = 410;

/// The body of an answer, to be read as it arrives.
pub(super) type Body = Pin<Box<dyn AsyncBufRead>>;

/// Why the API server or a kubeconfig cannot be used as configured.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConfigError {
    #[error("--kube-api-url {url}: {error}: write https://HOST:PORT")]
    Url { url: String, error: http::uri::InvalidUri },
    #[error("--kubeconfig-file {}: {}", path.display(), chain(error))]
    Kubeconfig { path: PathBuf, error: KubeconfigError },
    #[error(transparent)]
    Proxy(#[from] BadProxy),
    #[error("{}: outside of a pod give --kubeconfig-file or --kube-api-url", chain(.0))]
    OutsideOfPod(InClusterError),
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    #[error("no answer within {} s", CALL_LIMIT.as_secs())]
    NoAnswer,
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{}", explain(.0))]
    Kube(kube::Error),
    /// There is no connection. The text of the libraries shows what is probably wrong, and the remedy follows it.
    #[error("{0}")]
    NotConnected(String),
    #[error("{}", chain(.0))]
    Connection(#[from] io::Error),
    #[error("the answer was cut off")]
    CutOff,
    #[error("the answer cannot be read: {0}")]
    Json(serde_json::Error),
    #[error("the answer contains a line of more than {} MiB", MAX_LINE >> 20)]
    TooLarge,
    #[error("the server closed the watch at once")]
    ClosedAtOnce,
    #[error("not even a bookmark within {} s", SILENCE_LIMIT.as_secs())]
    NoBookmark,
}

impl From<serde_json::Error> for ApiError {
    fn from(error: serde_json::Error) -> ApiError {
        if error.is_eof() { ApiError::CutOff } else { ApiError::Json(error) }
    }
}

impl ApiError {
    /// Returns the HTTP code if the server answered with an error, else 0.
    pub(super) fn code(&self) -> u16 {
        match self {
            ApiError::Kube(kube::Error::Api(status)) => status.code,
            _ => 0,
        }
    }

    /// Returns true if the server works and refuses this request, so that trying again does not help.
    ///
    /// Too many requests (429) and conflicts with another writer (409) pass. So do rejected credentials (401): they may have expired
    /// while the node was off, and the kubelet renews them or the clock is set.
    fn is_refusal(&self) -> bool {
        matches!(self.code(), 400..=499) && !matches!(self.code(), UNAUTHORIZED | 408 | CONFLICT | GONE | 429)
    }
}

/// Returns what an admin can do about a refusal, in parentheses.
fn remedy(status: &Status) -> &'static str {
    let contains = |words: &str| status.message.contains(words);
    match status.code {
        UNAUTHORIZED => " (the credentials are not accepted: check the token, certificate or kubeconfig)",
        // The messages of the policy in deploy/kube. The server adds which policy it was.
        403 | 422 if contains("changes no annotations but its own") => {
            " (--kube-annotation-prefix must be the prefix in this policy: policy.annotationPrefix of the chart)"
        }
        403 | 422 if contains("this token is not bound to this node") => {
            " (NODE_NAME must be the node that the pod runs on; policies like this need Kubernetes 1.30; `weft lease rm` of \
             another node needs an administrator's --kubeconfig-file)"
        }
        403 | 422 if contains("ValidatingAdmissionPolicy") || contains("admission webhook") => {
            " (an admission policy of the cluster: it must let agents patch their annotations and nodes/status)"
        }
        403 if contains("\"events.k8s.io\"") => {
            " (RBAC: events.k8s.io create and patch in the namespace default are needed; --kube-events=off turns events off)"
        }
        403 => {
            " (RBAC: nodes get, list, watch and nodes/status patch are needed; pods get without NODE_NAME; what the user of \
             this message may do is shown by: kubectl auth can-i --list --as=USER)"
        }
        _ => "",
    }
}

/// Returns what to do about a connection to this URL that cannot be made, in parentheses. `text` is what the libraries say about it. The
/// numbers are those of ENETUNREACH, ETIMEDOUT and EHOSTUNREACH, whose texts differ between C libraries.
fn remedy_of_connection(url: &str, text: &str) -> Option<String> {
    let is_one_of = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let flags = "check --kube-api-url or --kubeconfig-file";
    let cause = if is_one_of(&["onnection refused"]) {
        format!("nothing listens there: {flags}, and in a pod whether kube-proxy runs on this node")
    } else if is_one_of(&["dns error", "failed to lookup address"]) {
        format!("the name does not resolve: {flags}, and the DNS of this node")
    } else if is_one_of(&["deadline has elapsed", "os error 101", "os error 110", "os error 113"]) {
        format!("{flags}, the firewalls on the way, and in a pod whether kube-proxy runs on this node")
    } else {
        return None;
    };
    Some(format!(" ({cause}; curl -k {}/readyz asks it again)", url.trim_end_matches('/')))
}

/// Formats an error of the crate kube: a refusal with its remedy, anything else with its causes.
fn explain(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("{}{}", status.message, remedy(status));
    }
    // Begin below the wrapper, which only says "ServiceError: ...".
    let first: &dyn std::error::Error = match error {
        kube::Error::Service(inner) => &**inner,
        kube::Error::HyperError(inner) => inner,
        other => other,
    };
    chain(first)
}

/// Where the API server is, and with which credentials to use it.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// `--kube-api-url`. It counts more than the URL in the kubeconfig.
    pub url: Option<String>,
    /// `--kubeconfig-file`. Without it and `url` the service account of the pod is used.
    pub kubeconfig: Option<PathBuf>,
    /// The proxies of the environment.
    pub proxies: Proxies,
}

/// The API server.
pub(super) struct Api {
    access: Access,
    client: RefCell<Option<Client>>,
    /// The URL of the last client.
    url: RefCell<Option<String>>,
    /// What makes clients in place of the crate kube.
    #[cfg(feature = "kube-channel")]
    clients: Option<Clients>,
}

/// Returns a client of an API server.
#[cfg(feature = "kube-channel")]
pub type Clients = Box<dyn Fn() -> Client>;

impl Api {
    pub(super) fn new(access: Access) -> Api {
        Api {
            access,
            client: RefCell::new(None),
            url: RefCell::new(None),
            #[cfg(feature = "kube-channel")]
            clients: None,
        }
    }

    #[cfg(feature = "kube-channel")]
    pub(super) fn use_clients(&mut self, clients: Clients) {
        self.clients = Some(clients);
    }

    /// Returns the URL of the server or, before the first request, where it will come from.
    pub(super) fn describe(&self) -> String {
        match (&self.access.url, &self.access.kubeconfig, &*self.url.borrow()) {
            (_, _, Some(url)) => url.clone(),
            (Some(url), _, _) => url.clone(),
            (None, Some(file), _) => file.display().to_string(),
            (None, None, None) => "in-cluster".to_owned(),
        }
    }

    /// Returns a text that differs between clusters: URL and CA. `None` while the credentials cannot be read.
    pub(super) async fn fingerprint(&self) -> Option<String> {
        let config = self.config().await.ok()?;
        let ca = crc32fast::hash(&config.root_cert.unwrap_or_default().concat());
        Some(format!("kubernetes {} ca {ca:08x}", config.cluster_url))
    }

    /// Drops the client, so that the next request makes a new one.
    pub(super) fn reset(&self) {
        *self.client.borrow_mut() = None;
    }

    async fn config(&self) -> Result<Config, ConfigError> {
        let parse =
            |url: &String| url.parse::<http::Uri>().map_err(|error| ConfigError::Url { url: url.clone(), error });
        let url = self.access.url.as_ref().map(parse).transpose()?;
        let mut proxy_of_cluster = None;
        let mut config = match (&self.access.kubeconfig, &url) {
            (Some(path), _) => {
                let failed = |error| ConfigError::Kubeconfig { path: path.clone(), error };
                let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
                proxy_of_cluster = proxy_url(&kubeconfig).map(str::to_owned);
                Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(failed)?
            }
            (None, Some(url)) => Config::new(url.clone()),
            (None, None) => Config::incluster_env().map_err(ConfigError::OutsideOfPod)?,
        };
        if let Some(url) = url {
            config.cluster_url = url;
        }
        // The crate's own choice compares NO_PROXY with the address of the proxy, and knows no proxy inside of a pod.
        if proxy_of_cluster.is_none() {
            config.proxy_url = self.access.proxies.of(&config.cluster_url)?;
        }
        config.connect_timeout = Some(CONNECT_LIMIT);
        // Every caller has its own back-off.
        config.default_retry = false;
        Ok(config)
    }

    async fn client(&self) -> Result<Client, ApiError> {
        if let Some(client) = &*self.client.borrow() {
            return Ok(client.clone());
        }
        let config = self.config().await?;
        *self.url.borrow_mut() = Some(config.cluster_url.to_string());
        let client = self.connect(config)?;
        *self.client.borrow_mut() = Some(client.clone());
        Ok(client)
    }

    fn connect(&self, config: Config) -> Result<Client, ApiError> {
        #[cfg(feature = "kube-channel")]
        if let Some(clients) = &self.clients {
            return Ok(clients());
        }
        Client::try_from(config).map_err(ApiError::Kube)
    }

    async fn limited<T>(&self, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, ApiError> {
        let error = match timeout(CALL_LIMIT, call).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => self.failed(error),
            Err(_) => ApiError::NoAnswer,
        };
        // A server that answered needs no new connection, unless it rejected the credentials.
        if error.code() == 0 || error.code() == UNAUTHORIZED {
            self.reset();
        }
        Err(error)
    }

    /// Names the remedy if there is no connection. An answer of the server may quote a connection of its own, such as that to a webhook.
    fn failed(&self, error: kube::Error) -> ApiError {
        if matches!(error, kube::Error::Api(_)) {
            return ApiError::Kube(error);
        }
        let text = explain(&error);
        match remedy_of_connection(&self.describe(), &text) {
            Some(remedy) => ApiError::NotConnected(text + &remedy),
            None => ApiError::Kube(error),
        }
    }

    /// Reads an object.
    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        let client = self.client().await?;
        self.limited(client.request(request(Method::GET, path, Vec::new()))).await
    }

    /// Creates an object, and returns it as the server wrote it.
    pub(super) async fn create<T: DeserializeOwned>(&self, path: &str, object: &Value) -> Result<T, ApiError> {
        let client = self.client().await?;
        self.limited(client.request(request(Method::POST, path, object.to_string().into_bytes()))).await
    }

    /// Patches an object, and returns it as it is then.
    pub(super) async fn patch<T: DeserializeOwned>(&self, path: &str, patch: &Value) -> Result<T, ApiError> {
        let client = self.client().await?;
        self.limited(client.request(request(Method::PATCH, path, patch.to_string().into_bytes()))).await
    }

    /// Begins to read an answer whose body is large or has no end.
    pub(super) async fn open(&self, path: &str) -> Result<Body, ApiError> {
        let client = self.client().await?;
        let body = self.limited(client.request_stream(request(Method::GET, path, Vec::new()))).await?;
        Ok(Box::pin(body))
    }

    /// Turns a failed request into the error of the store. `what` names the operation and the object.
    pub(super) fn error(&self, what: &str, error: ApiError) -> Error {
        if error.code() == NOT_FOUND {
            return Error::Missing(what.to_owned());
        }
        let what = format!("{what} from {}", self.describe());
        if error.is_refusal() {
            return Error::Refused { what, source: Box::new(error) };
        }
        Error::Unavailable { what, source: Some(Box::new(error)) }
    }
}

/// Returns the `proxy-url` of the current cluster. It counts more than the environment, and NO_PROXY does not concern it.
fn proxy_url(kubeconfig: &Kubeconfig) -> Option<&str> {
    let current = kubeconfig.current_context.as_ref()?;
    let context = kubeconfig.contexts.iter().find(|context| context.name == *current)?.context.as_ref()?;
    let cluster = kubeconfig.clusters.iter().find(|cluster| cluster.name == context.cluster)?.cluster.as_ref()?;
    cluster.proxy_url.as_deref().filter(|url| !url.is_empty())
}

fn request(method: Method, path: &str, body: Vec<u8>) -> Request<Vec<u8>> {
    let mut request = Request::new(body);
    let kind = match method {
        Method::PATCH => Some("application/strategic-merge-patch+json"),
        Method::POST => Some("application/json"),
        _ => None,
    };
    if let Some(kind) = kind {
        request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    }
    *request.method_mut() = method;
    // The name of a Node is a DNS name, which fits into a path. For a NODE_NAME that does not, the server answers that there is no such Node.
    *request.uri_mut() = path.parse().unwrap_or_else(|_| Uri::from_static(NO_SUCH_PATH));
    request
}

#[cfg(test)]
mod tests;
