// SPDX-License-Identifier: Apache-2.0
//! Why a call to etcd failed, whether another endpoint may do better, and what the operator can do about it.

use crate::retry::{chain, with_causes};
use crate::source::Error;

use super::CALL_LIMIT;

/// gRPC status codes. The client returns them as numbers.
const CANCELLED: i32 = 1;
const UNKNOWN: i32 = 2;
const DEADLINE_EXCEEDED: i32 = 4;
const RESOURCE_EXHAUSTED: i32 = 8;
const FAILED_PRECONDITION: i32 = 9;
const OUT_OF_RANGE: i32 = 11;
const INTERNAL: i32 = 13;
const UNAVAILABLE: i32 = 14;

/// The codes with which one member of etcd refuses what another one may do. A learner answers with FAILED_PRECONDITION, a member with too
/// many requests with RESOURCE_EXHAUSTED.
const ELSEWHERE: [i32; 7] =
    [CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, INTERNAL, UNAVAILABLE];

/// What to do when etcd is full.
pub(super) const NO_SPACE: &str =
    "etcdctl compact REVISION, etcdctl defrag, etcdctl alarm disarm; or a larger --quota-backend-bytes";

/// What the libraries say if a name has no address.
const NO_NAME: &[&str] = &["dns error", "failed to lookup address"];

/// What is said if no answer comes: our own limit, that of the library, and the errors ENETUNREACH, ETIMEDOUT and EHOSTUNREACH, whose texts
/// differ between C libraries. A member of etcd that answers with "request timed out" is reached.
const NO_ANSWER: &[&str] =
    &["no answer within", "deadline has elapsed", "os error 101", "os error 110", "os error 113"];

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallFailure {
    #[error("no answer within {} s", CALL_LIMIT.as_secs())]
    Silent,
    #[error("{}", explain(.0))]
    Etcd(etcd_client::Error),
    #[error("{0}")]
    Stream(String),
    /// There is no connection, and the text of the libraries shows what is probably wrong.
    #[error("{failure}{remedy}")]
    Connection { failure: Box<CallFailure>, remedy: String },
}

/// Returns what to do about a connection to this URL that cannot be made, in parentheses. `text` is what the libraries say about it.
fn remedy(url: &str, text: &str) -> String {
    let is_one_of = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let is_tls = url.starts_with("https://");
    let unreached = if is_one_of(&["onnection refused"]) {
        "nothing listens there: check --etcd-endpoints, and whether etcd runs"
    } else if is_one_of(NO_NAME) {
        "the name does not resolve: check --etcd-endpoints, and the DNS of this node"
    } else if is_one_of(NO_ANSWER) {
        "check --etcd-endpoints, the firewalls on the way, and whether etcd hangs"
    } else {
        ""
    };
    if !unreached.is_empty() {
        return format!(" ({unreached}; weft doctor --check-store --etcd-endpoints={url} asks it again)");
    }
    let fixed = if is_tls && is_one_of(&["InvalidContentType", "handshake eof", "onnection reset", "broken pipe"]) {
        " (if no TLS is spoken there, write http:// in --etcd-endpoints)"
    } else if is_tls && is_one_of(&["invalid peer certificate"]) {
        " (its certificate must be signed by the CA of --etcd-cafile, and name this host)"
    } else if !is_tls && is_one_of(&["broken pipe", "frame with invalid size", "onnection reset", "h2 protocol error"])
    {
        " (if etcd speaks TLS there, write https:// in --etcd-endpoints, with --etcd-cafile)"
    } else {
        ""
    };
    fixed.to_owned()
}

fn explain(error: &etcd_client::Error) -> String {
    match error {
        etcd_client::Error::GRpcStatus(status) => {
            // The message of the status is only "transport error". The last of its sources says what happened.
            let mut text = with_causes(status.message().to_owned(), status);
            if is_about_auth(error) {
                text.push_str(" (check --etcd-username and --etcd-password, and the user's role)");
            }
            text.push_str(&no_space(status.message()));
            text
        }
        other => other.to_string(),
    }
}

/// Returns what to do when etcd writes nothing any more, because its database has reached its quota. An alarm keeps it so until it is disarmed.
fn no_space(message: &str) -> String {
    if message.contains("database space exceeded") {
        format!(" (etcd is full and refuses all writes: {NO_SPACE})")
    } else {
        String::new()
    }
}

/// Returns true if this is an answer of etcd that refuses the call: the connection works.
pub(super) fn is_refusal(error: &etcd_client::Error) -> bool {
    let codes = [RESOURCE_EXHAUSTED, FAILED_PRECONDITION];
    matches!(error, etcd_client::Error::GRpcStatus(status) if codes.contains(&(status.code() as i32)))
}

/// Returns true if the same call may succeed on another endpoint.
pub(super) fn may_succeed_elsewhere(error: &etcd_client::Error) -> bool {
    match error {
        etcd_client::Error::GRpcStatus(status) => ELSEWHERE.contains(&(status.code() as i32)) && !is_auth_off(error),
        etcd_client::Error::InvalidArgs(_) | etcd_client::Error::InvalidUri(_) => false,
        _ => true,
    }
}

/// Returns true if etcd refused the user or the token.
pub(super) fn is_about_auth(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    let text = status.message();
    text.contains("auth") || text.contains("permission denied") || text.contains("user name")
}

/// Returns true if etcd refused a login because it has authentication turned off.
pub(super) fn is_auth_off(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    status.code() as i32 == FAILED_PRECONDITION && status.message().contains("authentication is not enabled")
}

/// Returns true if a write that failed with this error may have been carried out anyway: an endpoint did not answer, or the last one
/// that was asked refused what an earlier one may have done.
pub(super) fn may_be_done(error: &Error) -> bool {
    let Error::Unavailable { source: Some(source), .. } = error else { return false };
    match source.downcast_ref::<CallFailure>() {
        Some(CallFailure::Etcd(error)) => may_succeed_elsewhere(error),
        Some(CallFailure::Silent | CallFailure::Stream(_) | CallFailure::Connection { .. }) => true,
        None => false,
    }
}

/// Returns true if the answer was larger than [`super::client::MESSAGE_LIMIT`]. It was not read into memory, and another endpoint would
/// send the same.
pub(super) fn too_large(error: &Error) -> bool {
    let Error::Unavailable { source: Some(source), .. } = error else { return false };
    matches!(source.downcast_ref::<CallFailure>(), Some(CallFailure::Etcd(error)) if message_too_large(error))
}

/// Does the same as [`too_large`] for the error of a call or a stream. The text decides, too, because etcd also uses this code for a revision
/// that was compacted.
pub(super) fn message_too_large(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    status.code() as i32 == OUT_OF_RANGE && status.message().contains("message length too large")
}

/// Returns the error for a call that failed on all endpoints, or was refused.
pub(super) fn store_error(what: &str, url: &str, failure: CallFailure) -> Error {
    let what = format!("{what} from {url}");
    match &failure {
        CallFailure::Etcd(error) if is_about_auth(error) && !may_succeed_elsewhere(error) => {
            Error::Refused { what, source: Box::new(failure) }
        }
        _ => {
            let remedy = remedy(url, &chain(&failure));
            let failure = if remedy.is_empty() {
                failure
            } else {
                CallFailure::Connection { failure: Box::new(failure), remedy }
            };
            Error::Unavailable { what, source: Some(Box::new(failure)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CallFailure, Error, chain, may_be_done, no_space, remedy, store_error};

    #[test]
    fn an_etcd_that_is_full_names_the_commands_that_make_room() {
        let remedy = no_space("etcdserver: mvcc: database space exceeded");
        assert!(remedy.contains("etcdctl defrag, etcdctl alarm disarm"), "{remedy}");
        assert_eq!(no_space("etcdserver: too many requests"), "");
    }

    /// After such a write our key may be there, attached to the etcd lease that was granted for it. If that were revoked, the key would vanish.
    #[test]
    fn a_write_without_an_answer_may_be_done_and_a_refused_one_is_not() {
        let after = |failure: CallFailure| {
            let source: Box<dyn std::error::Error + Send + Sync> = Box::new(failure);
            may_be_done(&Error::Unavailable { what: "create our key".into(), source: Some(source) })
        };
        let broken = || CallFailure::Etcd(etcd_client::Error::IoError(std::io::ErrorKind::BrokenPipe.into()));
        assert!(after(CallFailure::Silent) && after(broken()) && after(CallFailure::Stream("it was closed".into())));
        assert!(after(CallFailure::Connection { failure: Box::new(broken()), remedy: " (check it)".into() }));
        assert!(!after(CallFailure::Etcd(etcd_client::Error::InvalidArgs("no key".into()))), "it was never sent");
        assert!(!may_be_done(&Error::Unavailable { what: "other nodes were faster".into(), source: None }));
        assert!(!may_be_done(&Error::Missing("our key".into())));
    }

    #[test]
    fn an_endpoint_where_nothing_listens_names_the_next_command() {
        let said = remedy("http://10.0.0.1:2379", "tcp connect error: Connection refused (os error 111)");
        assert!(said.contains("weft doctor --check-store --etcd-endpoints=http://10.0.0.1:2379 asks"), "{said}");
    }

    #[test]
    fn a_silent_endpoint_and_a_name_without_an_address_name_the_next_command() {
        let url = "http://etcd.test:2379";
        let command = format!("; weft doctor --check-store --etcd-endpoints={url} asks it again)");
        let (silent, hangs) = (CallFailure::Silent.to_string(), "the firewalls on the way, and whether etcd hangs");
        for (text, cause) in [
            (silent.as_str(), hangs),
            ("tcp connect error: deadline has elapsed", hangs),
            ("tcp connect error: Host is unreachable (os error 113)", hangs),
            ("dns error: failed to lookup address information: Name does not resolve", "the DNS of this node"),
        ] {
            let said = remedy(url, text);
            assert!(said.contains("check --etcd-endpoints") && said.contains(&format!("{cause}{command}")), "{said}");
        }
        for answer in ["etcdserver: request timed out", "etcdserver: no leader"] {
            assert_eq!(remedy(url, answer), "", "etcd was reached");
        }
    }

    /// The text of a fault goes to the log, to `weft status` and to `weft doctor`.
    #[test]
    fn a_remedy_is_said_once() {
        let error = store_error("read /coreos.com/network/config", "http://10.0.0.1:2379", CallFailure::Silent);
        let text = chain(&error);
        assert!(
            text.starts_with("read /coreos.com/network/config from http://10.0.0.1:2379: no answer within"),
            "{text}"
        );
        assert_eq!(text.matches("weft doctor").count(), 1, "{text}");
    }

    /// A server without TLS may close the connection before it answers, after which the kernel reports a reset.
    #[test]
    fn a_connection_that_is_reset_names_the_other_scheme() {
        for text in ["Connection reset by peer (os error 104)", "broken pipe"] {
            assert!(remedy("https://10.0.0.1:2379", text).contains("write http://"), "{text}");
            assert!(remedy("http://10.0.0.1:2379", text).contains("write https://"), "{text}");
        }
    }
}
