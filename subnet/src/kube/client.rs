// SPDX-License-Identifier: Apache-2.0
//! Talking to the API server: credentials, one call at a time with a time limit, and what went wrong in words.
//!
//! A client is made when it is first needed and forgotten after a failure: the next one reads the files anew, so that a
//! client certificate or kubeconfig that was renewed is used without a restart. (Tokens in files are read again each minute.)

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, HeaderValue};
use http::{Method, Request};
use http_body_util::BodyExt;
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use crate::retry::chain;
use crate::source::Error;

use super::proto::{self, Garbled, Reader};

/// How long one call may take.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(10);
/// After a boot nobody answers at the address of a Service until kube-proxy has written its rules: the start goes on with saved
/// peers then, and every second counts.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("no answer within {} s", CALL_LIMIT.as_secs())]
    Silent,
    #[error("{0}")]
    Config(String),
    #[error("{}", explain(.0))]
    Kube(kube::Error),
    #[error("{0}")]
    Stream(String),
}

impl From<Garbled> for Fault {
    fn from(garbled: Garbled) -> Fault {
        Fault::Stream(garbled.to_string())
    }
}

impl Fault {
    /// The code of the server's refusal; 0 where it refused nothing.
    pub(super) fn code(&self) -> u16 {
        match self {
            Fault::Kube(kube::Error::Api(status)) => status.code,
            _ => 0,
        }
    }

    /// The server works and does not want this call. Too many calls, and writes that others got in between, are no refusals; nor
    /// are credentials that ran out while the node was off, which the kubelet or a clock puts right.
    fn refuses(&self) -> bool {
        matches!(self.code(), 400..=499) && !matches!(self.code(), 401 | 408 | 409 | 410 | 429)
    }
}

/// What is to be done about a refusal.
fn remedy(status: &Status) -> &'static str {
    let said = |words: &str| status.message.contains(words);
    match status.code {
        401 => " (the credentials are not accepted: check the token, certificate or kubeconfig)",
        // Of the policy in deploy/kube; the server adds its own reason.
        403 | 422 if said("changes no annotations but its own") => {
            " (--kube-annotation-prefix must be the prefix in this policy: policy.annotationPrefix of the chart)"
        }
        403 | 422 if said("this token is not bound to this node") => {
            " (NODE_NAME must be the node that the pod runs on; policies like this need Kubernetes 1.30)"
        }
        403 | 422 if said("ValidatingAdmissionPolicy") || said("admission webhook") => {
            " (an admission policy of the cluster: it must let agents patch their annotations and nodes/status)"
        }
        403 => " (RBAC: nodes get, list, watch and nodes/status patch are needed; pods get without NODE_NAME)",
        _ => "",
    }
}

/// The whole chain of causes, each said once; what the server refused with its remedy.
fn explain(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("{}{}", status.message, remedy(status));
    }
    // The client's own words ("ServiceError: ...") stand for what lies below.
    let first: &dyn std::error::Error = match error {
        kube::Error::Service(inner) => &**inner,
        kube::Error::HyperError(inner) => inner,
        other => other,
    };
    chain(first)
}

/// Where the API is, and who we are to it.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// `--kube-api-url`: instead of what the kubeconfig says.
    pub url: Option<String>,
    /// `--kubeconfig-file`. Without either: the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
}

/// The API server.
pub(super) struct Api {
    access: Access,
    made: RefCell<Option<Client>>,
    /// Where the last one led.
    url: RefCell<Option<String>>,
}

impl Api {
    pub(super) fn new(access: Access) -> Api {
        Api { access, made: RefCell::new(None), url: RefCell::new(None) }
    }

    /// For people.
    pub(super) fn describe(&self) -> String {
        match (&self.access.url, &self.access.kubeconfig, &*self.url.borrow()) {
            (_, _, Some(url)) => url.clone(),
            (Some(url), _, _) => url.clone(),
            (None, Some(file), _) => file.display().to_string(),
            (None, None, None) => "in-cluster".to_owned(),
        }
    }

    /// What tells this cluster from others: its URL and its CA. `None` while credentials cannot be read.
    pub(super) async fn identity(&self) -> Option<String> {
        let config = self.config().await.ok()?;
        let ca = crc32fast::hash(&config.root_cert.unwrap_or_default().concat());
        Some(format!("kubernetes {} ca {ca:08x}", config.cluster_url))
    }

    /// The next call makes a new client.
    pub(super) fn forget(&self) {
        *self.made.borrow_mut() = None;
    }

    async fn config(&self) -> Result<Config, String> {
        let url = self.access.url.as_ref().map(|url| {
            url.parse::<http::Uri>().map_err(|error| format!("--kube-api-url {url}: {error}: write https://HOST:PORT"))
        });
        let url = url.transpose()?;
        let mut config = match (&self.access.kubeconfig, &url) {
            (Some(file), _) => {
                let named = |error| format!("--kubeconfig-file {}: {}", file.display(), chain(&error));
                let read = Kubeconfig::read_from(file).map_err(named)?;
                Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.map_err(named)?
            }
            (None, Some(url)) => Config::new(url.clone()),
            (None, None) => Config::incluster_env().map_err(|error| {
                format!("{}: outside of a pod give --kubeconfig-file or --kube-api-url", chain(&error))
            })?,
        };
        if let Some(url) = url {
            config.cluster_url = url;
        }
        config.connect_timeout = Some(CONNECT_LIMIT);
        // Whoever calls waits in its own way.
        config.default_retry = false;
        Ok(config)
    }

    async fn client(&self) -> Result<Client, Fault> {
        if let Some(client) = &*self.made.borrow() {
            return Ok(client.clone());
        }
        let config = self.config().await.map_err(Fault::Config)?;
        *self.url.borrow_mut() = Some(config.cluster_url.to_string());
        let client = Client::try_from(config).map_err(Fault::Kube)?;
        *self.made.borrow_mut() = Some(client.clone());
        Ok(client)
    }

    async fn limited<T>(&self, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Fault> {
        let fault = match timeout(CALL_LIMIT, call).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => Fault::Kube(error),
            Err(_) => Fault::Silent,
        };
        // What the server said no to needs no new connection, unless it is about who we are.
        if fault.code() == 0 || fault.code() == 401 {
            self.forget();
        }
        Err(fault)
    }

    /// Reads an object.
    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Fault> {
        let client = self.client().await?;
        self.limited(client.request(request(Method::GET, path, Vec::new()))).await
    }

    /// Patches an object; what it is then.
    pub(super) async fn patch<T: DeserializeOwned>(&self, path: &str, patch: &Value) -> Result<T, Fault> {
        let client = self.client().await?;
        self.limited(client.request(request(Method::PATCH, path, patch.to_string().into_bytes()))).await
    }

    /// Opens a body in Kubernetes' own encoding; `accept` as in [`proto`].
    pub(super) async fn open(&self, path: &str, accept: &'static str) -> Result<Reader, Fault> {
        let client = self.client().await?;
        let mut request = request(Method::GET, path, Vec::new()).map(Body::from);
        request.headers_mut().insert(ACCEPT, HeaderValue::from_static(accept));
        let open = async {
            let answer = client.send(request).await?;
            let code = answer.status();
            if code.is_success() {
                return Ok(Reader::new(answer.into_body()));
            }
            Err(refusal(code.as_u16(), answer.into_body().collect().await?.to_bytes()))
        };
        self.limited(open).await
    }

    /// The error for a call that failed.
    pub(super) fn error(&self, what: &str, fault: Fault) -> Error {
        if fault.code() == 404 {
            return Error::Missing(what.to_owned());
        }
        let what = format!("{what} from {}", self.describe());
        if fault.refuses() {
            return Error::Refused { what, source: Box::new(fault) };
        }
        Error::Unavailable { what, source: Some(Box::new(fault)) }
    }
}

/// What a server refused, as [`proto`] or in the words of whoever stands before it.
fn refusal(code: u16, body: Bytes) -> kube::Error {
    let said = proto::object::<proto::Status>(body.clone()).unwrap_or_else(|_| proto::Status {
        message: String::from_utf8_lossy(&body).trim().to_owned(),
        ..proto::Status::default()
    });
    kube::Error::Api(Status::failure(&said.message, &said.reason).with_code(code).boxed())
}

fn request(method: Method, path: &str, body: Vec<u8>) -> Request<Vec<u8>> {
    let mut request = Request::new(body);
    if method == Method::PATCH {
        let kind = http::HeaderValue::from_static("application/strategic-merge-patch+json");
        request.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    }
    *request.method_mut() = method;
    // Names of nodes are DNS names; whatever else stands there makes a path that does not exist.
    *request.uri_mut() = path.parse().unwrap_or_default();
    request
}

#[cfg(test)]
#[path = "client/tests.rs"]
mod tests;
