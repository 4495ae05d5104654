// SPDX-License-Identifier: Apache-2.0
//! The HTTP proxy through which the API server is reached, chosen as Go's clients choose it: by `HTTPS_PROXY` and `NO_PROXY`, each also in
//! small letters (golang.org/x/net/http/httpproxy).

use std::fmt;
use std::net::IpAddr;

use http::Uri;
use ipnet::IpNet;

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

/// Returns the host of a URL as Go's clients compare it: an IPv6 address has no brackets.
fn host_of(server: &Uri) -> &str {
    server.host().unwrap_or_default().trim_matches(['[', ']'])
}

/// Returns the address if this text is one. The IPv4 address in an IPv6 address such as `::ffff:192.0.2.1` is the same as without that prefix.
fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// Returns true for the loopback addresses, to which Go's clients never use a proxy.
fn is_this_host(server: &Uri) -> bool {
    let host = host_of(server);
    host == "localhost" || address(host).is_some_and(|ip| ip.is_loopback())
}

/// Returns true if the list of NO_PROXY names this server. `*` as one of the entries names all servers.
fn excepts(list: &str, server: &Uri) -> bool {
    let host = host_of(server).to_lowercase();
    let port = server.port_u16().unwrap_or(443).to_string();
    let list = list.to_lowercase();
    list.split(',').map(str::trim).any(|entry| entry == "*" || names(entry, &host, &port))
}

/// Returns true if an entry of NO_PROXY names this host: by its address, a network that contains the address, its name or its domain. An entry
/// with a port is for that port only. Unlike Go, letters beyond ASCII are not converted.
fn names(entry: &str, host: &str, port: &str) -> bool {
    let ip = address(host);
    if let Ok(network) = entry.parse::<IpNet>() {
        return ip.is_some_and(|ip| network.contains(&ip));
    }
    let (named, only) = split_port(entry).unwrap_or((entry, ""));
    if !only.is_empty() && only != port {
        return false;
    }
    match (address(named), ip) {
        (Some(named), Some(ip)) => named == ip,
        (None, None) => is_in_domain(named, host),
        _ => false,
    }
}

/// Returns true if this name is the host, or a domain that contains it. With a dot or with `*.` in front, the name is only a domain.
fn is_in_domain(name: &str, host: &str) -> bool {
    let name = if name.starts_with("*.") { &name[1..] } else { name };
    match name.strip_prefix('.') {
        Some(_) => host.ends_with(name),
        None if name.is_empty() => false,
        None => host.strip_suffix(name).is_some_and(|front| front.is_empty() || front.ends_with('.')),
    }
}

/// Splits `HOST:PORT` or `[HOST]:PORT`. Returns `None` for everything else, such as an IPv6 address without a port, as Go's `net.SplitHostPort`.
fn split_port(entry: &str) -> Option<(&str, &str)> {
    let (front, port) = entry.rsplit_once(':')?;
    let has = |text: &str, any: &[char]| text.contains(any);
    let host = match front.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?,
        None if has(front, &[':']) => return None,
        None => front,
    };
    (!has(host, &['[', ']']) && !has(port, &['[', ']'])).then_some((host, port))
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
            ("https://192.0.2.1:6443", "example.org, *", true),
            ("https://192.0.2.1:6443", "*:6443", false),
            ("https://192.0.2.1:6443", "2.1", false),
            ("https://192.0.2.1:6443", "*.1", false),
            ("https://192.0.2.1:6443", "::ffff:192.0.2.1", true),
            ("https://192.0.2.1:6443", "192.0.2.0/24:6443", false),
            ("https://192.0.2.1:6443", "192.0.2.1:", true),
            ("https://192.0.2.1:6443", "", false),
            ("https://192.0.2.1:6443", " ,:6443", false),
            ("https://api.example.org", ".example.org", true),
            ("https://api.example.org", "example.org", true),
            ("https://api.example.org", "*.example.org", true),
            ("https://api.example.org", "*example.org", false),
            ("https://api.example.org", "API.Example.org", true),
            ("https://API.example.org", "api.example.org", true),
            ("https://api.example.org", "ple.org", false),
            ("https://api.example.org", "*", true),
            ("https://api.example.org", "192.0.2.1,*,10.0.0.0/8", true),
            ("https://api.example.org", "0.0.0.0/0", false),
            ("https://api.example.org", "api.example.org:443", true),
            ("https://api.example.org", "*.example.org:443", true),
            ("https://api.example.org", ".example.org:6443", false),
            ("https://api.example.org", ":443", false),
            ("https://example.org", "example.org", true),
            ("https://example.org", ".example.org", false),
            ("https://example.org", "*.example.org", false),
            ("https://[2001:db8::1]:6443", "2001:db8::/32", true),
            ("https://[2001:db8::1]:6443", "2001:db8::1", true),
            ("https://[2001:db8::1]:6443", "[2001:db8::1]:6443", true),
            ("https://[2001:db8::1]:6443", "[2001:db8::1]:443", false),
            // Go does not take the brackets off without a port, so this is the name of a host.
            ("https://[2001:db8::1]:6443", "[2001:db8::1]", false),
            ("https://[2001:db8::1]:6443", "2001:db8::2", false),
            ("https://[2001:db8::1]:6443", "*", true),
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
