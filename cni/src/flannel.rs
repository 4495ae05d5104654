// SPDX-License-Identifier: Apache-2.0
//! The plugin that replaces flannel's.

use std::path::Path;

use serde_json::{Map, Value};

use crate::bridge;
use crate::conf::Conf;
use crate::delegate;
use crate::env::{Request, Verb, is_namespace};
use crate::plugin::Call;
use crate::record::{self, Locked};
use crate::render::{self, kind};
use crate::spec::{Error, code};
use crate::subnet_env::CheckedSubnetEnv;
use crate::{gc, status, wait};

/// Handles one call and returns what goes to standard output.
///
/// # Errors
/// The error that goes to standard output.
pub fn answer(call: &Call) -> Result<Vec<u8>, Error> {
    let conf = Conf::read(&call.conf);
    match call.request.verb {
        Verb::Add => add(call, &conf?),
        // DEL must also work with a configuration that has become invalid since ADD.
        Verb::Del => del(call, &conf.or_else(|_| Conf::paths(&call.conf))?),
        Verb::Check => check(call, &conf?),
        Verb::Gc => gc::run(call, &conf?),
        Verb::Status => status::run(call, &conf?),
        // `plugin::main` answers VERSION.
        Verb::Version => Ok(Vec::new()),
    }
}

fn add(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let request = &call.request;
    request.check_netns()?;
    let env = wait::for_agent(conf)?;
    let rendered = render::delegate(call, conf, &env)?;
    // The checks precede the record, so that a missing delegate or a wrong value leaves nothing behind.
    delegate::find(kind(&rendered), &request.path)?;
    bridge::repair(&rendered, &env)?;
    let value = Value::Object(rendered);
    note!("configuration of the delegate: {value}");
    let Value::Object(rendered) = &value else { return Ok(Vec::new()) };
    delegate::validate(kind(rendered), &value, request)?;
    let locked = record::write(&conf.data_dir, request, rendered)?;
    delegate::call(kind(rendered), &value, Verb::Add, request).inspect_err(|_| roll_back(locked, request))
}

/// Removes what a failed ADD created. If that fails, the record stays for the runtime's DEL or for GC.
///
/// An ADD for a pod that already had a record is not rolled back, because that pod may be running.
fn roll_back(locked: Locked, request: &Request) {
    if !locked.is_new {
        note!("{} existed before this ADD, so nothing is rolled back: DEL removes it", locked.record.path.display());
    } else if let Err(error) = delegate::del_recorded(locked, request) {
        note!("roll back the failed ADD: {error}");
    }
}

fn del(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let mut request = call.request.clone();
    // The kernel may have reused the process id in such a path, so it may lead to the host's namespace now. With it,
    // the delegate would delete the host's own interface.
    if matches!(request.is_own_netns(), Ok(true)) {
        note!("netns {} is the plugin's own: the pod's namespace is gone", request.netns);
        request.netns.clear();
    }
    // The bridge plugin refuses such a path. The pod could never be removed then.
    if Path::new(&request.netns).exists() && !is_namespace(&request.netns) {
        note!("netns {} is no namespace any more: the pod's namespace is gone", request.netns);
        request.netns.clear();
    }
    if let Some(locked) = record::find(&conf.data_dir, &request.container, &request.ifname)? {
        delegate::del_recorded(locked, &request)?;
    }
    Ok(Vec::new())
}

/// Checks that the node still has the pod's subnet, and calls the delegate's CHECK for everything else.
fn check(call: &Call, conf: &Conf) -> Result<Vec<u8>, Error> {
    let request = &call.request;
    request.check_netns()?;
    let Some(result) = call.conf.get("prevResult").filter(|result| result.is_object()) else {
        return Err(Error::new(code::CONFIG, "prevResult is missing"));
    };
    let text = format!("no record of {} {} in {}", request.container, request.ifname, conf.data_dir.display());
    let locked = record::find(&conf.data_dir, &request.container, &request.ifname)?
        .ok_or_else(|| Error::new(code::UNKNOWN_CONTAINER, text))?;
    let text = format!("{} is not valid JSON", locked.record.path.display());
    let mut rendered = locked.record.conf.clone().ok_or_else(|| Error::new(code::DECODE, text))?;
    for key in ["prevResult", "cniVersion", "runtimeConfig"] {
        if let Some(value) = call.conf.get(key) {
            rendered.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(routes) = rendered.get_mut("prevResult").and_then(|result| result.get_mut("routes")?.as_array_mut()) {
        fill_in_gateways(routes, result);
    }
    if let Ok(env) = CheckedSubnetEnv::load(&conf.subnet_file) {
        check_subnets(result, &rendered, &env)?;
    }
    let name = kind(&rendered).to_owned();
    delegate::call(&name, &Value::Object(rendered), Verb::Check, request).map(|_| Vec::new())
}

/// Fills in the gateway of routes without one: it is the gateway of the pod's address. The bridge and ptp plugins use
/// it when they add the route, but CHECK compares the gateways literally.
fn fill_in_gateways(routes: &mut [Value], result: &Value) {
    let is_v6 = |value: &Value| value.as_str().is_some_and(|text| text.contains(':'));
    for route in routes.iter_mut().filter(|route| route.is_object() && route["gw"].is_null()) {
        let same_family = |ip: &&Value| is_v6(&ip["address"]) == is_v6(&route["dst"]);
        let gateway = result["ips"].as_array().into_iter().flatten().find(same_family).map(|ip| ip["gateway"].clone());
        if let Some(gateway) = gateway.filter(Value::is_string) {
            route["gw"] = gateway;
        }
    }
}

fn check_subnets(result: &Value, rendered: &Map<String, Value>, env: &CheckedSubnetEnv) -> Result<(), Error> {
    // Another program may have written the record.
    let recorded = rendered.get("ipam").and_then(|ipam| ipam.get("ranges")).unwrap_or(&Value::Null);
    let now = render::ranges(env);
    if *recorded == now {
        return Ok(());
    }
    let text = format!("the pod was added with the subnets {recorded}, but the node has {now} now: delete the pod");
    Err(Error::new(code::OTHER, text).details(result["ips"].to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_route_without_a_gateway_gets_that_of_the_address_of_its_family() {
        let result = json!({"ips": [
            {"address": "10.5.1.2/24", "gateway": "10.5.1.1"},
            {"address": "fd05:0:0:1::2/64", "gateway": "fd05:0:0:1::1"},
        ]});
        let mut routes = [
            json!({"dst": "fd05::/48"}),
            json!({"dst": "10.5.0.0/16", "gw": null}),
            json!({"dst": "0.0.0.0/0", "gw": "10.5.1.9"}),
            json!("a text is no route"),
        ];
        let mut wanted = routes.clone();
        (wanted[0]["gw"], wanted[1]["gw"]) = (json!("fd05:0:0:1::1"), json!("10.5.1.1"));
        fill_in_gateways(&mut routes, &result);
        assert_eq!(routes, wanted);
        let alone = json!({"dst": "10.5.0.0/16"});
        for without in [json!({}), json!({"ips": [{"address": "10.5.1.2/24"}]})] {
            let mut routes = [alone.clone()];
            fill_in_gateways(&mut routes, &without);
            assert_eq!(routes, [json!({"dst": "10.5.0.0/16"})], "{without}");
        }
    }

    #[test]
    fn check_refuses_a_pod_of_another_subnet_and_a_record_without_subnets() {
        let of =
            |subnet: &str| CheckedSubnetEnv { subnets: vec![subnet.parse().unwrap()], ..CheckedSubnetEnv::default() };
        let (result, env) = (json!({"ips": [{"address": "10.5.1.2/24"}]}), of("10.5.1.0/24"));
        let checked = |record: Value| check_subnets(&result, record.as_object().unwrap(), &env);
        let ranges = render::ranges(&env);
        assert_eq!(checked(json!({"ipam": {"ranges": ranges}})), Ok(()));
        let earlier = render::ranges(&of("10.5.2.0/24"));
        for record in [json!({"ipam": {"ranges": earlier}}), json!({"ipam": {}}), json!({"ipam": 7}), json!({})] {
            let error = checked(record.clone()).unwrap_err();
            assert_eq!((error.code, error.msg.contains("10.5.1.0/24")), (code::OTHER, true), "{record}: {error}");
            assert!(error.details.contains("10.5.1.2/24"), "{record}: {error}");
        }
    }
}
