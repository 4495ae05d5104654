// SPDX-License-Identifier: Apache-2.0
//! The HTTP proxy through which the API server is reached, chosen as Go's clients choose it: by `HTTPS_PROXY` and `NO_PROXY`, each also in
//! small letters (golang.org/x/net/http/httpproxy).

use std::fmt;
use std::net::IpAddr;

use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;

/// Why the proxy cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadProxy {
    #[error("HTTPS_PROXY: {0:?} is not a URL: write http://HOST:PORT")]
    NotAUrl(String),
    #[error(
        "HTTPS_PROXY: a proxy of the kind {0} is not supported: write http://HOST:PORT, or name the API server in NO_PROXY"
    )]
    Scheme(String),
}

/// What the environment says about proxies.
#[derive(Clone, Default)]
pub struct Proxies {
    /// `HTTPS_PROXY`.
    https: Option<String>,
    /// `NO_PROXY`.
    no: Option<String>,
}

impl fmt::Debug for Proxies {
    /// Writes no URL, because it may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxies").finish_non_exhaustive()
    }
}

impl Proxies {
    /// Reads the variables. `variable` returns a variable of the environment.
    pub fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Proxies {
        let given = |name: &str| variable(name).filter(|text| !text.is_empty());
        let either = |name: &str| given(name).or_else(|| given(&name.to_lowercase()));
        Proxies { https: either("HTTPS_PROXY"), no: either("NO_PROXY") }
    }

    /// Returns the proxy for this server, if there is one.
    ///
    /// # Errors
    /// The proxy cannot be used, and NO_PROXY does not name the server.
    pub(super) fn of(&self, server: &Uri) -> Result<Option<Uri>, BadProxy> {
        let Some(text) = self.https.as_ref().filter(|_| server.scheme_str() == Some("https")) else { return Ok(None) };
        if is_this_host(server) || self.no.as_ref().is_some_and(|list| excepts(list, server)) {
            return Ok(None);
        }
        let url = if text.contains("://") { text.clone() } else { format!("http://{text}") };
        // The text may contain a password, which a message must not show.
        let shown = || text.split('@').next_back().unwrap_or_default().to_owned();
        let uri: Uri = url.parse().map_err(|_| BadProxy::NotAUrl(shown()))?;
        match uri.scheme_str() {
            Some("http") => Ok(Some(uri)),
            scheme => Err(BadProxy::Scheme(scheme.unwrap_or_default().to_owned())),
        }
    }
}

/// Returns true for the loopback addresses, to which Go's clients never use a proxy.
fn is_this_host(server: &Uri) -> bool {
    let host = server.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Returns true if the list of NO_PROXY names this server: its host, its domain, its address, or a network that contains it. An entry with a
/// port is for that port only.
fn excepts(list: &str, server: &Uri) -> bool {
    let port = server.port_u16().unwrap_or(443);
    if list.trim() == "*" {
        return true;
    }
    let entries: Vec<&str> = list.split(',').filter_map(|entry| without_port(entry.trim(), port)).collect();
    let all = Matcher::builder().https("http://proxy.invalid").no(entries.join(",")).build();
    all.intercept(server).is_none()
}

/// Returns the entry without its port, or `None` if it is for another port.
fn without_port(entry: &str, port: u16) -> Option<&str> {
    match entry.rsplit_once(':') {
        Some((host, number)) if !host.contains(':') || host.ends_with(']') => match number.parse::<u16>() {
            Ok(number) => (number == port).then_some(host.trim_matches(['[', ']'])),
            Err(_) => Some(entry),
        },
        _ => Some(entry.trim_matches(['[', ']'])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(server: &str, variables: &[(&str, &str)]) -> Result<Option<String>, BadProxy> {
        let variable =
            |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned());
        Ok(Proxies::from_environment(variable).of(&server.parse().unwrap())?.map(|uri| uri.to_string()))
    }

    #[test]
    fn the_proxy_is_chosen_as_by_go() {
        const PROXY: (&str, &str) = ("HTTPS_PROXY", "http://10.0.0.9:3128");
        let through = Ok(Some("http://10.0.0.9:3128/".to_owned()));
        let server = "https://192.0.2.1:6443";
        assert_eq!(chosen(server, &[]), Ok(None));
        assert_eq!(chosen(server, &[("HTTP_PROXY", "http://10.0.0.9:3128")]), Ok(None), "it is for http");
        assert_eq!(chosen(server, &[PROXY]), through);
        assert_eq!(chosen(server, &[("https_proxy", "http://10.0.0.9:3128")]), through);
        assert_eq!(chosen(server, &[("HTTPS_PROXY", ""), ("https_proxy", "10.0.0.9:3128")]), through);
        let password = chosen(server, &[("HTTPS_PROXY", "http://user:p%40ss@10.0.0.9:3128")]);
        assert_eq!(password, Ok(Some("http://user:p%40ss@10.0.0.9:3128/".to_owned())));
        for unproxied in
            ["http://192.0.2.1:8080", "https://127.0.0.1:6443", "https://localhost:6443", "https://[::1]:6443"]
        {
            assert_eq!(chosen(unproxied, &[PROXY]), Ok(None), "{unproxied}");
        }
    }

    #[test]
    fn no_proxy_excepts_hosts_domains_addresses_and_networks() {
        let is_direct = |server: &str, list: &str| {
            chosen(server, &[("HTTPS_PROXY", "http://10.0.0.9:3128"), ("NO_PROXY", list)]) == Ok(None)
        };
        for (server, list, expected) in [
            ("https://192.0.2.1:6443", "192.0.2.1", true),
            ("https://192.0.2.1:6443", "10.0.0.0/8, 192.0.2.0/24", true),
            ("https://192.0.2.1:6443", "*", true),
            ("https://192.0.2.1:6443", "192.0.2.1:6443", true),
            ("https://192.0.2.1:6443", "192.0.2.1:443", false),
            ("https://192.0.2.1:6443", "192.0.2.2", false),
            ("https://api.example.org", ".example.org", true),
            ("https://api.example.org", "example.org", true),
            ("https://api.example.org", "ple.org", false),
            ("https://api.example.org", "api.example.org:443", true),
            ("https://[2001:db8::1]:6443", "2001:db8::/32", true),
            ("https://[2001:db8::1]:6443", "[2001:db8::1]:6443", true),
            ("https://[2001:db8::1]:6443", "2001:db8::2", false),
        ] {
            assert_eq!(is_direct(server, list), expected, "{server} with {list}");
        }
        let small = chosen("https://192.0.2.1", &[("HTTPS_PROXY", "http://10.0.0.9:1"), ("no_proxy", "192.0.2.1")]);
        assert_eq!(small, Ok(None));
    }

    #[test]
    fn a_proxy_that_cannot_be_used_is_named_without_its_password() {
        let refused = |url: &str| chosen("https://192.0.2.1", &[("HTTPS_PROXY", url)]).unwrap_err().to_string();
        assert!(refused("socks5://user:secret@10.0.0.9:1080").contains("of the kind socks5"));
        let text = refused("http://user:secret@10.0.0.9:x y");
        assert!(text.contains("is not a URL") && !text.contains("secret"), "{text}");
        let excepted = [("HTTPS_PROXY", "socks5://10.0.0.9:1080"), ("NO_PROXY", "192.0.2.1")];
        assert_eq!(chosen("https://192.0.2.1", &excepted), Ok(None), "it is not needed");
    }
}
