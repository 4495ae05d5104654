// SPDX-License-Identifier: Apache-2.0
//! The delegate's configuration: the user's wishes, filled up from subnet.env (flannel-compat.md section 12).

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use crate::conf::Conf;
use crate::plugin::Call;
use crate::spec::{Error, code};
use crate::subnet_env::SubnetEnv;

/// The type of the delegate when the user names none.
pub const BRIDGE: &str = "bridge";

/// The delegate's whole configuration.
///
/// # Errors
/// [`code::CONFIG`] when the user's routes are none.
pub fn delegate(call: &Call, conf: &Conf, env: &SubnetEnv) -> Result<Map<String, Value>, Error> {
    let mut all = conf.delegate.clone();
    if let Some(runtime) = &conf.runtime_config {
        all.insert("runtimeConfig".to_owned(), runtime.clone());
    }
    all.insert("name".to_owned(), json!(call.name));
    let fill = |all: &mut Map<String, Value>, key: &str, value: Value| {
        all.entry(key).or_insert(value);
    };
    fill(&mut all, "type", json!(BRIDGE));
    // Who masquerades: the agent, or else the delegate.
    fill(&mut all, "ipMasq", json!(!env.ipmasq));
    fill(&mut all, "mtu", json!(env.mtu));
    if kind(&all) == BRIDGE {
        fill(&mut all, "isGateway", json!(true));
    }
    if let Some(version) = call.conf.get("cniVersion").and_then(Value::as_str).filter(|version| !version.is_empty()) {
        all.insert("cniVersion".to_owned(), json!(version));
    }
    all.insert("ipam".to_owned(), Value::Object(ipam(conf, env)?));
    Ok(all)
}

/// The type of a rendered configuration; empty when a record of somebody else has none.
pub fn kind(all: &Map<String, Value>) -> &str {
    all.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn ipam(conf: &Conf, env: &SubnetEnv) -> Result<Map<String, Value>, Error> {
    let mut ipam = conf.ipam.clone();
    ipam.entry("type").or_insert(json!("host-local"));
    let ranges: Vec<_> = env.subnets.iter().map(|net| json!([{"subnet": net}])).collect();
    ipam.insert("ranges".to_owned(), json!(ranges));
    let mut routes = match ipam.get("routes") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(routes)) if routes.iter().all(is_route) => routes.clone(),
        Some(other) => return Err(Error::new(code::CONFIG, format!("failed to parse ipam.routes: {other}"))),
    };
    routes.extend(env.networks.iter().map(|net| json!({"dst": net})));
    ipam.insert("routes".to_owned(), json!(routes));
    Ok(ipam)
}

fn is_route(route: &Value) -> bool {
    route.get("dst").and_then(Value::as_str).is_some_and(|dst| dst.parse::<IpNet>().is_ok())
}
