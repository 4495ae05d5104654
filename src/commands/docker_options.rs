// SPDX-License-Identifier: Apache-2.0
//! `weft docker-opts`: writes the options that Docker needs to use the subnet of this node, as flannel's script `mk-docker-opts.sh` does. It
//! has the same flags, reads the same variables and writes the same file.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;

use anyhow::Context;
use ipnet::Ipv4Net;

use crate::cli::drop_in::DockerOptions;
use crate::files;

/// Variables with this beginning are options of Docker.
const OPTION: &str = "DOCKER_OPT_";
/// The IPv4 routes of the main table.
const ROUTES: &str = "/proc/net/route";
/// The route has a gateway (RTF_GATEWAY of the kernel).
const BY_GATEWAY: u32 = 2;

/// Writes the file. `variables` is the environment.
///
/// # Errors
/// A variable is wrong, a file cannot be read or written, or the subnet of this node is routed to a gateway. In the last case the file was
/// written before.
pub fn run(options: &DockerOptions, mut variables: BTreeMap<String, String>) -> anyhow::Result<()> {
    if options.subnet_file.is_file() {
        let text = files::read_text(&options.subnet_file);
        variables.extend(assignments(&text.with_context(|| format!("read {}", options.subnet_file.display()))?));
    }
    let text = render(options, &mut variables)?;
    // Not renamed: the file may be a device such as /dev/stdout.
    fs::write(&options.output, text).with_context(|| format!("write {}", options.output.display()))?;
    let subnet = variables.get("FLANNEL_SUBNET").and_then(|subnet| subnet.parse().ok());
    if let Some(subnet) = subnet.map(|subnet: Ipv4Net| subnet.trunc())
        && let Some(gateway) = gateway(subnet, &fs::read_to_string(ROUTES).unwrap_or_default())
    {
        anyhow::bail!("the routing table sends the subnet {subnet} to {gateway}: remove that route, and start again");
    }
    Ok(())
}

/// Returns the text of the file, and adds the options to the variables.
fn render(options: &DockerOptions, variables: &mut BTreeMap<String, String>) -> anyhow::Result<String> {
    let key = &options.key;
    let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    anyhow::ensure!(!key.is_empty() && key.chars().all(name), "-k {key}: this is not the name of a variable");
    if let Some(subnet) = given(variables, "FLANNEL_SUBNET") {
        variables.insert(format!("{OPTION}BIP"), format!("--bip={subnet}"));
    }
    if let Some(mtu) = given(variables, "FLANNEL_MTU") {
        variables.insert(format!("{OPTION}MTU"), format!("--mtu={mtu}"));
    }
    if let Some(masq) = given(variables, "FLANNEL_IPMASQ").filter(|_| !options.without_ip_masq) {
        // Either the agent masquerades or Docker does.
        let docker: bool = match masq.as_str() {
            "true" => false,
            "false" => true,
            _ => anyhow::bail!("FLANNEL_IPMASQ={masq}: give true or false"),
        };
        variables.insert(format!("{OPTION}IPMASQ"), format!("--ip-masq={docker}"));
    }
    let both = !options.individual && !options.combined;
    let mut text = String::new();
    let mut all = given(variables, key).map(|value| value + " ").unwrap_or_default();
    for (name, value) in variables.iter().filter(|(name, _)| name.starts_with(OPTION)) {
        if options.individual || both {
            text.push_str(&format!("{name}=\"{value}\"\n"));
        }
        all.push(' ');
        all.push_str(value);
    }
    if options.combined || both {
        text.push_str(&format!("{key}=\"{all}\"\n"));
    }
    Ok(text)
}

/// Returns the value of a variable that is set and not empty.
fn given(variables: &BTreeMap<String, String>, name: &str) -> Option<String> {
    variables.get(name).filter(|value| !value.is_empty()).cloned()
}

/// Returns the variables that the lines `NAME=VALUE` set. A value may be in quotes.
fn assignments(text: &str) -> impl Iterator<Item = (String, String)> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| {
        let (name, value) = line.strip_prefix("export ").unwrap_or(line).split_once('=')?;
        let inner = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
        Some((name.to_owned(), inner('"').or_else(|| inner('\'')).unwrap_or(value).to_owned()))
    })
}

/// Returns the gateway to which the table, in the form of /proc/net/route, sends this network.
fn gateway(net: Ipv4Net, table: &str) -> Option<Ipv4Addr> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    // The kernel prints addresses as numbers in its own byte order.
    let address = |text: &str| number(text).map(|bits| Ipv4Addr::from(bits.to_ne_bytes()));
    table.lines().find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [_, to, gateway, flags, _, _, _, mask, ..] = columns[..] else { return None };
        let is_it = address(to)? == net.addr() && address(mask)? == net.netmask() && number(flags)? & BY_GATEWAY != 0;
        is_it.then(|| address(gateway)).flatten()
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: DockerOptions,
    }

    const SUBNET_ENV: &str =
        "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n";

    /// Returns the file that these flags give.
    fn written(flags: &str, subnet_env: Option<&str>, environment: &[(&str, &str)]) -> anyhow::Result<String> {
        let home = tempfile::tempdir().unwrap();
        let (input, output) = (home.path().join("subnet.env"), home.path().join("docker.env"));
        if let Some(text) = subnet_env {
            fs::write(&input, text).unwrap();
        }
        let mut options = Line::parse_from(["x"].into_iter().chain(flags.split_whitespace())).options;
        (options.subnet_file, options.output) = (input, output.clone());
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        run(&options, environment.collect())?;
        Ok(fs::read_to_string(output).unwrap())
    }

    /// The texts are what flannel's script wrote for the same input.
    #[test]
    fn the_file_is_that_of_flannels_script() {
        let (bip, masq, mtu) = (
            "DOCKER_OPT_BIP=\"--bip=10.1.74.1/24\"\n",
            "DOCKER_OPT_IPMASQ=\"--ip-masq=true\"\n",
            "DOCKER_OPT_MTU=\"--mtu=1472\"\n",
        );
        let all = "\" --bip=10.1.74.1/24 --ip-masq=true --mtu=1472\"\n";
        for (flags, expected) in [
            ("", format!("{bip}{masq}{mtu}DOCKER_OPTS={all}")),
            ("-i -c", format!("{bip}{masq}{mtu}DOCKER_OPTS={all}")),
            ("-i", format!("{bip}{masq}{mtu}")),
            ("-c", format!("DOCKER_OPTS={all}")),
            ("-k CUSTOM_KEY", format!("{bip}{masq}{mtu}CUSTOM_KEY={all}")),
            ("-m", format!("{bip}{mtu}DOCKER_OPTS=\" --bip=10.1.74.1/24 --mtu=1472\"\n")),
        ] {
            assert_eq!(written(flags, Some(SUBNET_ENV), &[]).unwrap(), expected, "{flags}");
        }
        let masquerades = SUBNET_ENV.replace("false", "true");
        assert_eq!(
            written("-c", Some(&masquerades), &[]).unwrap(),
            "DOCKER_OPTS=\" --bip=10.1.74.1/24 --ip-masq=false --mtu=1472\"\n"
        );
    }

    #[test]
    fn variables_of_the_environment_count_as_in_the_script() {
        let environment = [("FLANNEL_SUBNET", "10.9.9.1/24"), ("FLANNEL_MTU", "1400"), ("DOCKER_OPTS", "--debug")];
        assert_eq!(
            written("-c", None, &environment).unwrap(),
            "DOCKER_OPTS=\"--debug  --bip=10.9.9.1/24 --mtu=1400\"\n",
            "without a subnet file"
        );
        let file = written("-c", Some(SUBNET_ENV), &environment).unwrap();
        assert!(file.contains("--bip=10.1.74.1/24 "), "the file wins: {file}");
        let other = written("-i", Some("FLANNEL_MTU='1400'\n"), &[("DOCKER_OPT_LOG", "--log-level=warn")]).unwrap();
        assert_eq!(other, "DOCKER_OPT_LOG=\"--log-level=warn\"\nDOCKER_OPT_MTU=\"--mtu=1400\"\n");
        let exported = written("-i", Some(" export FLANNEL_MTU=\"1390\"\n"), &[]).unwrap();
        assert_eq!(exported, "DOCKER_OPT_MTU=\"--mtu=1390\"\n");
        assert_eq!(written("", None, &[]).unwrap(), "DOCKER_OPTS=\"\"\n", "nothing is known");
    }

    #[test]
    fn wrong_values_are_named() {
        let refusal = |flags: &str, env: &str| format!("{:#}", written(flags, Some(env), &[]).unwrap_err());
        assert_eq!(refusal("", "FLANNEL_IPMASQ=maybe\n"), "FLANNEL_IPMASQ=maybe: give true or false");
        assert!(refusal("-k A;B", SUBNET_ENV).contains("not the name of a variable"));
        let home = tempfile::tempdir().unwrap();
        let mut options = Line::parse_from(["x"]).options;
        (options.subnet_file, options.output) = (home.path().join("none"), home.path().join("none/file"));
        let refusal = format!("{:#}", run(&options, BTreeMap::new()).unwrap_err());
        assert!(refusal.contains(&format!("write {}", options.output.display())), "{refusal}");
    }

    #[test]
    fn a_route_of_the_subnet_by_a_gateway_is_found() {
        let hex = |a: u8, b: u8, c: u8, d: u8| format!("{:08X}", u32::from_ne_bytes([a, b, c, d]));
        let line = |to: &str, gateway: &str, flags: &str| {
            let mask = hex(255, 255, 255, 0);
            format!("eth0\t{to}\t{gateway}\t{flags}\t0\t0\t0\t{mask}\t0\t0\t0\n")
        };
        let (subnet, other, gw, none) = (hex(10, 1, 74, 0), hex(10, 1, 75, 0), hex(192, 168, 0, 1), hex(0, 0, 0, 0));
        let head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";
        let net: Ipv4Net = "10.1.74.0/24".parse().unwrap();
        let found = |line: String| gateway(net, &format!("{head}{line}"));
        assert_eq!(found(line(&subnet, &gw, "0003")), Some(Ipv4Addr::new(192, 168, 0, 1)));
        assert_eq!(found(line(&subnet, &none, "0001")), None, "the subnet on a link of this node");
        assert_eq!(found(line(&other, &gw, "0003")), None, "another subnet");
        assert_eq!(found("broken\n".to_owned()), None);
    }
}
